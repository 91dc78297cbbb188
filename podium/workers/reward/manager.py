"""From generated tokens to token-level scores, through a reward function."""

import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from podium.protocol.data import DataProto
from podium.protocol.values import object_array
from podium.utils.errors import UserError
from podium.utils.torch_functional import place_on_last_token
from podium.workers.reward.functions import RewardFn
from podium.workers.reward.inline import InlineScorer
from podium.workers.reward.outcome import Outcome, Scorer, ScoreRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardError(UserError):
    """A reward function failed on a sample. `outcome` has the whole traceback."""

    def __init__(self, message: str, outcome: Outcome | None = None):
        super().__init__(message)
        self.outcome = outcome


class RewardManager:
    """Decodes responses, has each scored, and puts the score on its last token.

    Args:
        fn: called with the keywords ``data_source``, ``solution_str``, ``ground_truth`` and ``extra_info`` (the row's,
            plus ``response_finished``, which is False for a response that was cut at the length limit); may be async.
        tokenizer: decodes, and says which token ends a response where ``meta_info["eos_token_id"]`` does not.
        num_workers: how many samples an async `fn` scores at the same time; a plain one is called row by row.
    """

    def __init__(self, fn: RewardFn, tokenizer: "PreTrainedTokenizerBase", *, num_workers: int = 16):
        if num_workers < 1:
            raise UserError(f"num_workers={num_workers}: expected at least 1")
        self._name = _describe(fn)
        self._tokenizer = tokenizer
        self._scorer: Scorer = InlineScorer(fn, num_workers)

    def check(self, row: Mapping[str, Any]) -> Outcome:
        """Scores the ground truth of one row of a data set, to find out now whether the function works at all.

        Raises:
            RewardError: it does not.
        """
        truth = _ground_truth(row.get("reward_model"))
        request = ScoreRequest(
            data_source=row.get("data_source", "unknown"),
            solution_str="" if truth is None else str(truth),
            ground_truth=truth,
            extra_info={**(row.get("extra_info") or {}), "response_finished": True},
        )
        [outcome] = self._scorer([request])
        self._require_score(outcome, f"row {row.get('index', 0)} of the data", request)
        _require_new_columns(outcome.extra, row, self._name)
        return outcome

    def __call__(self, data: DataProto) -> DataProto:
        """Scores a batch of B responses of width R.

        Needs ``responses`` and ``response_mask`` (B, R), which says what the policy wrote; with ``attention_mask``
        (B, P+R), whose last R columns say what is there at all, tokens of others (tools) are decoded too. Reads the
        object columns ``data_source``, ``reward_model`` and ``extra_info`` where they exist.

        Returns:
            A new batch: ``token_level_scores`` (B, R) float32, the score on the last token that the policy wrote, 0
            elsewhere; an object column for each further key of the function's results (None in rows without it); and
            ``meta_info["metrics"]``: ``reward/score/{mean,min,max}``, ``reward/finished/mean``, and
            ``reward/<key>/mean`` for each of those keys that is a number.

        Raises:
            RewardError: the first sample that got no score, or a key that is a column already.
        """
        batch = data.batch
        assert batch is not None, "a batch without responses"
        requests = self._requests(data, batch)
        outcomes = self._scorer(requests)
        indices = data.non_tensor_batch.get("index", range(len(data)))
        for row, (outcome, index) in enumerate(zip(outcomes, indices, strict=True)):
            self._require_score(outcome, f"sample {row} of the batch (data row {index})", requests[row])
        scores = torch.tensor([outcome.score for outcome in outcomes], dtype=torch.float32)
        extra = _columns(outcomes)
        _require_new_columns(extra, {**data.non_tensor_batch, **dict(batch.items())}, self._name)
        return DataProto.from_dict(
            {"token_level_scores": place_on_last_token(scores, batch["response_mask"])},
            {name: object_array(values) for name, values in extra.items()},
            {"metrics": _metrics(scores, [bool(r.extra_info["response_finished"]) for r in requests], extra)},
        )

    def close(self) -> None:
        """Ends what the scorer keeps running."""
        self._scorer.close()

    def _requests(self, data: DataProto, batch: TensorDict) -> list[ScoreRequest]:
        responses, present = batch["responses"], batch["response_mask"].bool()
        if batch.get("attention_mask", None) is not None:
            present = batch["attention_mask"][:, -responses.shape[1] :].bool()
        ids = [row[mask].tolist() for row, mask in zip(responses.cpu(), present.cpu(), strict=True)]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        ends = _as_set(data.meta_info.get("eos_token_id", self._tokenizer.eos_token_id))
        objects = data.non_tensor_batch
        empty = [None] * len(ids)
        columns = (objects.get(name, empty) for name in ("data_source", "reward_model", "extra_info"))
        return [
            ScoreRequest(
                data_source="unknown" if source is None else source,
                solution_str=text,
                ground_truth=_ground_truth(model),
                extra_info={**(info or {}), "response_finished": bool(tokens) and tokens[-1] in ends},
            )
            for tokens, text, source, model, info in zip(ids, texts, *columns, strict=True)
        ]

    def _require_score(self, outcome: Outcome, sample: str, request: ScoreRequest) -> None:
        if outcome.kind != "score":
            raise RewardError(
                f"reward function {self._name} on {sample}, data_source '{request.data_source}': {outcome.reason}",
                outcome,
            )


def _ground_truth(reward_model: Any) -> Any:
    return reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None


def _as_set(ids: Any) -> set[int]:
    return set(ids) if isinstance(ids, list | tuple | set) else {ids}


def _columns(outcomes: list[Outcome]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.extra)
    return {name: [outcome.extra.get(name) for outcome in outcomes] for name in names}


def _require_new_columns(extra: Mapping[str, Any], existing: Mapping[str, Any], function: str) -> None:
    taken = [name for name in extra if name in existing or name == "token_level_scores"]
    if taken:
        raise RewardError(f"reward function {function} returns key '{taken[0]}', which is a column already; rename it")


def _metrics(scores: torch.Tensor, finished: list[bool], extra: Mapping[str, list[Any]]) -> dict[str, float]:
    metrics = {
        "reward/score/mean": scores.mean().item(),
        "reward/score/min": scores.min().item(),
        "reward/score/max": scores.max().item(),
        "reward/finished/mean": sum(finished) / len(finished),
    }
    for name, values in extra.items():
        present = [float(value) for value in values if isinstance(value, numbers.Real)]
        if present:
            metrics[f"reward/{name}/mean"] = sum(present) / len(present)
    return metrics


def _describe(fn: RewardFn) -> str:
    return f"{fn.__module__}.{fn.__qualname__}" if hasattr(fn, "__qualname__") else repr(fn)
