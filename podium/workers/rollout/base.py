"""The rollout interface: requests in, tokens out. Every schedule (synchronous, partial, multi-turn) uses this one."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from podium.utils.errors import UserError
from podium.utils.piece import Piece

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""What an engine gives back when it sleeps, by vLLM's names."""

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class StaleWeightsError(RuntimeError):
    """The engine holds older weights than the caller asked for: nothing was generated."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. They travel with the request and come back with its result."""

    max_tokens: int
    """Longest response, in tokens, end-of-sequence token included."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    seed: int | None = None
    """The response depends on the weights, the prompt and this seed only, not on what shares its batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after (and the response includes) any of these."""

    def __post_init__(self) -> None:
        """One rule for every engine; left to themselves they disagree on what top_k=0 or top_p=0 means.

        Raises:
            UserError: a value outside its range.
        """
        for name, fits, expected in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "at least 0 (0 is greedy)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (the whole vocabulary) or at least 1"),
        ):
            if not fits:
                raise UserError(f"sampling: {name}={getattr(self, name)}, expected {expected}")


@dataclass(frozen=True)
class Request:
    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise UserError(f"request {self.request_id}: the prompt has no token, so there is nothing to continue")


@dataclass(frozen=True)
class Output:
    """A finished (or aborted, then partial) response."""

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    """Per token, under the distribution it was drawn from (temperature applied)."""
    finish_reason: str
    """``stop``, ``length`` or ``abort``."""
    sampling: SamplingParams
    weight_versions: list[int]
    """Per token, the version of the weights that produced it."""


class RolloutEngine(ABC):
    """One copy of the policy (over its own tp group) that serves generation requests.

    Tokens in, tokens out: text is never re-tokenised between rollout and training.
    """

    def __init__(self) -> None:
        self.weight_version = -1
        """Version of the weights held; -1 until the first sync, and generation is refused until then."""
        self._asleep: set[str] = set()

    def submit(self, request: Request) -> None:
        """Queues a request; it runs during the following calls of `step`.

        Raises:
            StaleWeightsError: the engine has no weights, or only part of them.
            ValueError: a request of that id is unfinished.
        """
        if self.weight_version < 0:
            raise StaleWeightsError(f"request {request.request_id}: the engine holds no weights yet: sync them first")
        self._wake(WEIGHTS, KV_CACHE)
        self._enqueue(request)

    @abstractmethod
    def _enqueue(self, request: Request) -> None:
        """Takes a request in."""

    @abstractmethod
    def step(self) -> list[Output]:
        """Advances all running requests by one token (or more), if there are any; returns those that finished."""

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> list[Output]:
        """Stops requests and returns what they have so far, with ``finish_reason="abort"``; passes over unknown ids."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Requests submitted and not yet returned."""

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """Everything that a checkpoint fills of what generation uses, as views: writing to them changes the policy."""

    @abstractmethod
    def drop_caches(self) -> None:
        """Forgets everything computed from older weights (prefix cache, encoder cache)."""

    @abstractmethod
    def shutdown(self) -> None:
        """Frees the engine's memory and processes."""

    def sleep(self, *, keep_weights: bool) -> int:
        """Gives the memory of the key-value cache back, and unless `keep_weights` that of the weights.

        It is taken again when it is needed: for the weights when an update begins, for the cache when the update is
        done, so that the two are never there beside what an update needs; or for the next request.

        Returns:
            The bytes that were freed.

        Raises:
            RuntimeError: requests are running.
        """
        if self.num_unfinished:
            raise RuntimeError(f"{self.num_unfinished} requests are running: finish them before the engine sleeps")
        if self._asleep:
            return 0
        if not keep_weights:
            self.overwrite()
        self._asleep = {WEIGHTS, KV_CACHE}
        return self._free(keep_weights)

    def _free(self, keep_weights: bool) -> int:
        """Does it; an engine that has nothing to give back frees nothing."""
        return 0

    def _take_again(self, what: str) -> None:  # noqa: B027 (nothing was given back)
        """Takes the memory of `WEIGHTS` or `KV_CACHE` again."""

    def _wake(self, *what: str) -> None:
        for each in what:
            if each in self._asleep:
                self._take_again(each)
                self._asleep.remove(each)

    def begin_update(self, version: int) -> None:
        """Says that `version` is coming; changes nothing, but for the memory of weights that were given back.

        Raises:
            ValueError: the version is not newer than the one held.
            RuntimeError: requests are running: their tokens would mix two policies unnoticed.
        """
        if version <= self.weight_version:
            raise ValueError(
                f"weights of version {version} offered, but the rollout already holds {self.weight_version}"
            )
        if self.num_unfinished:
            raise RuntimeError(
                f"{self.num_unfinished} requests are running: abort or finish them before a weight update"
            )
        self._wake(WEIGHTS)

    def overwrite(self) -> None:
        """To be called before anything is written to `pieces`: until `finish_update`, generation is refused."""
        self.weight_version = -1

    def finish_update(self, version: int) -> None:
        """Everything has been written to `pieces`: generation goes on, as `version`."""
        self._wake(KV_CACHE)
        self.drop_caches()
        self.weight_version = version

    def update_weights(self, version: int, weights: NamedTensors) -> None:
        """Takes whole tensors, under their Hugging Face names, as `version`.

        Raises:
            ValueError, RuntimeError: as `begin_update`.
            RuntimeError: parameters of the engine that no tensor filled, or tensors that it has no place for.
        """
        self.begin_update(version)
        self.overwrite()
        wanted: dict[str, list[Piece]] = defaultdict(list)
        for piece in self.pieces():
            wanted[piece.name].append(piece)
        unknown = []
        for name, tensor in weights:
            for piece in wanted.get(name, []):
                box = tuple(slice(start, stop) for start, stop in zip(piece.starts, piece.stops, strict=True))
                piece.tensor.copy_(tensor.detach()[box])
            if wanted.pop(name, None) is None:
                unknown.append(name)
        if wanted or unknown:
            problems = [f"no weights came for {len(wanted)} tensors, the first {min(wanted)}"] if wanted else []
            problems += [f"the engine has no {', '.join(unknown[:5])}"] if unknown else []
            raise RuntimeError("; ".join(problems))
        self.finish_update(version)

    def require_version(self, min_version: int) -> None:
        """Refuses older weights.

        Raises:
            StaleWeightsError: the engine's are older than `min_version`.
        """
        if self.weight_version < min_version:
            raise StaleWeightsError(
                f"generation asked for weights of version {min_version} or newer, the engine holds "
                f"{self.weight_version}: sync the weights first"
            )

    def generate(self, requests: list[Request], min_version: int) -> dict[str, Output]:
        """Runs requests to their end. Returns outputs by request id.

        Raises:
            StaleWeightsError: as `require_version`.
        """
        self.require_version(min_version)
        outputs: dict[str, Output] = {}
        try:
            for request in requests:
                self.submit(request)
            while self.num_unfinished:
                outputs.update((output.request_id, output) for output in self.step())
        except BaseException:
            self.abort(request.request_id for request in requests)  # what is left would block the next weight update
            raise
        return outputs
