"""From generated tokens to token-level scores, through a reward function."""

import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from podium.protocol.data import DataProto
from podium.protocol.values import object_array
from podium.utils.torch_functional import place_on_last_token
from podium.workers.reward.failures import FailureLog, RewardError
from podium.workers.reward.outcome import Outcome, Scorer, ScoreRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardManager:
    """Decodes responses, has each scored, and puts the score on its last token.

    A response without a score is no response with score 0: ``scored`` says which rows have one.

    Args:
        scorer: gets each row's ``data_source``, decoded response, ground truth and ``extra_info`` (with
            ``response_finished``, which is False for a response that was cut at the length limit).
        tokenizer: decodes, and says which token ends a response where ``meta_info["eos_token_id"]`` does not.
        max_failure_rate: share of a batch that may be without a score before the run stops.
    """

    def __init__(self, scorer: Scorer, tokenizer: "PreTrainedTokenizerBase", *, max_failure_rate: float = 0.0):
        self._name = scorer.describe()
        self._tokenizer = tokenizer
        self._scorer = scorer
        self.failures = FailureLog(f"reward function {self._name}", max_failure_rate)

    def check(self, row: Mapping[str, Any], where: str) -> Outcome:
        """Scores the ground truth of one row of a data set, to find out now whether the function works at all.

        Args:
            where: what errors call the row.

        Raises:
            RewardError: it does not.
        """
        request = trial_request(row)
        [outcome] = self._scorer([request])
        if outcome.kind != "score":
            raise RewardError(
                f"reward function {self._name} on {where}, data_source '{request.data_source}': {outcome.reason}",
                outcome,
            )
        _require_new_columns(outcome.extra, row, self._name)
        return outcome

    @property
    def takes_parts(self) -> bool:
        """Whether the outcomes of a batch may be asked for in parts."""
        return self._scorer.takes_parts

    def outcomes(self, data: DataProto) -> list[Outcome]:
        """What the scorer makes of each row of a batch, or of a part of one."""
        return self._scorer(score_requests(data, self._tokenizer))

    def __call__(self, data: DataProto, outcomes: list[Outcome] | None = None) -> DataProto:
        """Scores a batch of B responses of width R.

        Needs ``responses`` and ``response_mask`` (B, R), which says what the policy wrote; with ``attention_mask``
        (B, P+R), whose last R columns say what is there at all, tokens of others (tools) are decoded too. Reads the
        object columns ``data_source``, ``reward_model`` and ``extra_info`` where they exist.

        Args:
            outcomes: what the scorer has made of the rows, where that is known already.

        Returns:
            A new batch: ``token_level_scores`` (B, R) float32, the score on the last token that the policy wrote, 0
            elsewhere; ``scored`` (B,) bool, False where there is no score; an object column for each further key of the
            function's results (None in rows without it); and ``meta_info["metrics"]``, over the rows with a score:
            ``reward/score/{mean,min,max}``, ``reward/finished/mean``, and ``reward/<key>/mean`` for each of those keys
            that is a number; and those of `FailureLog`.

        Raises:
            RewardError: too many samples without a score, or a key that is a column already.
        """
        batch = data.batch
        assert batch is not None, "a batch without responses"
        requests = score_requests(data, self._tokenizer)
        outcomes = self._scorer(requests) if outcomes is None else outcomes
        failures = self.failures(requests, outcomes, list(data.non_tensor_batch.get("index", range(len(data)))))
        scored = torch.tensor([outcome.kind == "score" for outcome in outcomes])
        scores = torch.tensor([outcome.score or 0.0 for outcome in outcomes], dtype=torch.float32)
        finished = [bool(request.extra_info["response_finished"]) for request in requests]
        extra = _columns(outcomes)
        _require_new_columns(extra, {**data.non_tensor_batch, **dict(batch.items())}, self._name)
        return DataProto.from_dict(
            {"token_level_scores": place_on_last_token(scores, batch["response_mask"]), "scored": scored},
            {name: object_array(values) for name, values in extra.items()},
            {"metrics": {**_metrics(scores[scored], finished, extra), **failures}},
        )

    def cancel(self) -> None:
        """Has a call of `outcomes` that another thread waits for end soon."""
        self._scorer.cancel()

    def close(self) -> None:
        """Ends what the scorer keeps running."""
        self._scorer.close()


def score_requests(data: DataProto, tokenizer: "PreTrainedTokenizerBase") -> list[ScoreRequest]:
    """What is to be scored of a batch as `RewardManager` takes it, decoded by the policy's tokenizer."""
    batch = data.batch
    assert batch is not None, "a batch without responses"
    responses, present = batch["responses"], batch["response_mask"].bool()
    if batch.get("attention_mask", None) is not None:
        present = batch["attention_mask"][:, -responses.shape[1] :].bool()
    ids = [row[mask].tolist() for row, mask in zip(responses.cpu(), present.cpu(), strict=True)]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    ends = _as_set(data.meta_info.get("eos_token_id", tokenizer.eos_token_id))
    objects = data.non_tensor_batch
    empty = [None] * len(ids)
    columns = (objects.get(name, empty) for name in ("data_source", "reward_model", "extra_info", "raw_prompt"))
    return [
        ScoreRequest(
            data_source="unknown" if source is None else source,
            solution_str=text,
            ground_truth=_ground_truth(model),
            extra_info={**(info or {}), "response_finished": bool(tokens) and tokens[-1] in ends},
            prompt=prompt,
        )
        for tokens, text, source, model, info, prompt in zip(ids, texts, *columns, strict=True)
    ]


def trial_request(row: Mapping[str, Any]) -> ScoreRequest:
    """The ground truth of a row of a data set as a response, to find out whether scoring works at all."""
    truth = _ground_truth(row.get("reward_model"))
    return ScoreRequest(
        data_source=row.get("data_source", "unknown"),
        solution_str="" if truth is None else str(truth),
        ground_truth=truth,
        extra_info={**(row.get("extra_info") or {}), "response_finished": True},
        prompt=row.get("raw_prompt"),
    )


def _ground_truth(reward_model: Any) -> Any:
    return reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None


def _as_set(ids: Any) -> set[int]:
    return set(ids) if isinstance(ids, list | tuple | set) else {ids}


def _columns(outcomes: list[Outcome]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.extra)
    return {name: [outcome.extra.get(name) for outcome in outcomes] for name in names}


def _require_new_columns(extra: Mapping[str, Any], existing: Mapping[str, Any], function: str) -> None:
    taken = [name for name in extra if name in existing or name in ("token_level_scores", "scored")]
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
