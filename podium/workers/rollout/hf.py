"""Plain transformers as a rollout engine: needs nothing but the model, and is the reference for the others."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from podium.models.hf import load_hf_config
from podium.models.hf_layout import checkpoint_pieces
from podium.utils.device import device
from podium.utils.freed_memory import FreedMemory
from podium.utils.piece import Piece
from podium.workers.rollout.base import WEIGHTS, Output, Request, RolloutEngine


@dataclass
class _Row:
    """A request being decoded."""

    request: Request
    generator: torch.Generator | None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class HFRollout(RolloutEngine):
    """Batches whatever waits, and decodes the batch with a key-value cache until all of it is done.

    Args:
        model_path: Hugging Face directory; only its config is read, weights arrive by the first sync.
        dtype: ``float32`` or ``bfloat16``.
        max_num_seqs: most requests decoded together.
    """

    def __init__(self, model_path: str, *, dtype: str, max_num_seqs: int, trust_remote_code: bool = False):
        super().__init__()
        config = load_hf_config(model_path, "actor_rollout_ref.model.path", trust_remote_code)
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="sdpa", trust_remote_code=trust_remote_code
        )
        self._model = model.to(device()).eval().requires_grad_(False)
        self._max_num_seqs = max_num_seqs
        self._waiting: list[Request] = []
        self._rows: list[_Row] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._rows)

    def _enqueue(self, request: Request) -> None:
        unfinished = [*self._waiting, *(row.request for row in self._rows)]
        if any(request.request_id == other.request_id for other in unfinished):
            raise ValueError(f"request {request.request_id} is unfinished: ids must differ")
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        if not self.num_unfinished:
            return []
        logits = self._decode() if self._rows else self._prefill()
        log_probs, tokens = self._sample(logits)
        self._last = tokens
        finished, kept = [], []
        for index, row in enumerate(self._rows):
            row.tokens.append(int(tokens[index]))
            row.log_probs.append(float(log_probs[index]))
            reason = self._finish_reason(row)
            if reason:
                finished.append(self._output(row, reason))
            else:
                kept.append(index)
        self._keep(kept)
        return finished

    def _prefill(self) -> torch.Tensor:
        """Starts the next batch; prompts are left-padded so that the last column is everyone's newest token."""
        batch, self._waiting = self._waiting[: self._max_num_seqs], self._waiting[self._max_num_seqs :]
        self._rows = [_Row(request, self._generator(request)) for request in batch]
        width = max(len(request.prompt_ids) for request in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        self._mask = torch.zeros(len(batch), width, dtype=torch.long)
        for index, request in enumerate(batch):
            ids[index, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            self._mask[index, width - len(request.prompt_ids) :] = 1
        ids, self._mask = ids.to(device()), self._mask.to(device())
        self._cache = DynamicCache(config=self._model.config)
        return self._forward(ids, (self._mask.cumsum(1) - 1).clamp(min=0))

    def _decode(self) -> torch.Tensor:
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        return self._forward(self._last[:, None], self._mask.sum(1, keepdim=True) - 1)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Next-token logits (b, V) float32."""
        result = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return result.logits[:, -1].float()

    def _generator(self, request: Request) -> torch.Generator | None:
        if request.sampling.seed is None:
            return None
        return torch.Generator(device()).manual_seed(request.sampling.seed)

    def _sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws a token a row by an exponential race, each row with its own noise; log-probs and tokens (b,)."""
        params = [row.request.sampling for row in self._rows]
        temperature = torch.tensor([p.temperature for p in params], device=logits.device)
        greedy = temperature == 0
        logits = logits / torch.where(greedy, 1.0, temperature)[:, None]
        # Greedy rows are not restricted: the choice is the same, and vLLM reports its log-prob in the whole vocabulary.
        top_k = [p.top_k if p.temperature else -1 for p in params]
        logits = _restrict(logits, top_k, [p.top_p if p.temperature else 1.0 for p in params])
        log_probs = torch.log_softmax(logits, dim=-1)
        noise = torch.empty_like(log_probs)
        for row, target in zip(self._rows, noise, strict=True):
            target.exponential_(generator=row.generator)
        drawn = (log_probs - noise.log()).argmax(dim=-1)
        tokens = torch.where(greedy, log_probs.argmax(dim=-1), drawn)
        return log_probs.gather(1, tokens[:, None])[:, 0], tokens

    @staticmethod
    def _finish_reason(row: _Row) -> str | None:
        if row.tokens[-1] in row.request.sampling.stop_token_ids:
            return "stop"
        return "length" if len(row.tokens) >= row.request.sampling.max_tokens else None

    def _output(self, row: _Row, reason: str) -> Output:
        versions = [self.weight_version] * len(row.tokens)
        return Output(row.request.request_id, row.tokens, row.log_probs, reason, row.request.sampling, versions)

    def _keep(self, kept: list[int]) -> None:
        """Drops finished rows from the running batch and its cache."""
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[i] for i in kept]
        if not kept:
            del self._cache
            return
        index = torch.tensor(kept, device=self._mask.device)
        self._mask, self._last = self._mask[index], self._last[index]
        self._cache.batch_select_indices(index)

    def _free(self, keep_weights: bool) -> int:
        # The cache goes with each batch.
        self._freed = FreedMemory([] if keep_weights else self._model.parameters())
        return self._freed.nbytes

    def _take_again(self, what: str) -> None:
        if what == WEIGHTS:
            self._freed.restore()

    def abort(self, request_ids: Iterable[str]) -> list[Output]:
        wanted = set(request_ids)
        waiting = [_Row(r, None) for r in self._waiting if r.request_id in wanted]
        self._waiting = [r for r in self._waiting if r.request_id not in wanted]
        running = [row for row in self._rows if row.request.request_id in wanted]
        self._keep([i for i, row in enumerate(self._rows) if row.request.request_id not in wanted])
        return [self._output(row, "abort") for row in running + waiting]

    def pieces(self) -> list[Piece]:
        parameters = [(name, (0,) * p.dim(), p.data) for name, p in self._model.named_parameters()]
        return checkpoint_pieces(self._model.config.model_type, parameters)

    def drop_caches(self) -> None:
        """No cache outlives a batch."""

    def shutdown(self) -> None:
        del self._model


def _restrict(logits: torch.Tensor, top_k: list[int], top_p: list[float]) -> torch.Tensor:
    """Sets what top-k and top-p exclude to -inf, row by row; rows that restrict nothing are returned as they are."""
    vocabulary = logits.shape[-1]
    if all(k < 0 or k >= vocabulary for k in top_k) and all(p >= 1.0 for p in top_p):
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    limit = torch.tensor([vocabulary if k < 0 else k for k in top_k], device=logits.device)
    ordered = ordered.masked_fill(torch.arange(vocabulary, device=logits.device) >= limit[:, None], -torch.inf)
    probabilities = torch.softmax(ordered, dim=-1)
    # A token stays if the mass before it is below top_p: the one that crosses it is the last kept.
    before = probabilities.cumsum(dim=-1) - probabilities
    ordered = ordered.masked_fill(before >= torch.tensor(top_p, device=logits.device)[:, None], -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(1, order, ordered)
