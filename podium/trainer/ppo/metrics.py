"""A step's numbers, under verl's names, from the finished batch."""

from collections.abc import Mapping

import torch

from podium.protocol import DataProto, WorkerGroup
from podium.trainer.deadlines import phase_of
from podium.trainer.ppo.rollout_client import RolloutClient
from podium.trainer.ppo.scoring import scored_rows
from podium.utils.device import memory_used
from podium.utils.torch_functional import masked_mean, masked_var


def batch_metrics(batch: DataProto, max_response_length: int) -> dict[str, float]:
    """Scores, rewards, advantages, returns, values and lengths of the responses that have a score.

    Sequence sums for score and reward, valid tokens for the others.
    """
    scored = scored_rows(batch)
    batch = batch if scored.all() else batch.select_idxs(scored)
    assert batch.batch is not None
    tensors = batch.batch
    mask = tensors["response_mask"].bool()
    lengths = mask.sum(dim=-1).float()
    prompt_lengths = tensors["attention_mask"].sum(dim=-1).float() - lengths
    metrics = {
        **_spread("critic/score", tensors["token_level_scores"].sum(dim=-1)),
        **_spread("critic/rewards", tensors["token_level_rewards"].sum(dim=-1)),
        **_spread("critic/advantages", tensors["advantages"][mask]),
        **_spread("critic/returns", tensors["returns"][mask]),
        **_spread("response_length", lengths),
        **_spread("prompt_length", prompt_lengths),
        "response_length/clip_ratio": float((lengths == max_response_length).float().mean()),
    }
    if "values" in tensors:
        metrics.update(_spread("critic/values", tensors["values"][mask]))
        residual = masked_var(tensors["returns"] - tensors["values"], mask)
        metrics["critic/vf_explained_var"] = float(1.0 - residual / (masked_var(tensors["returns"], mask) + 1e-5))
    return metrics


def forward_metrics(batch: DataProto, weight_age: int = 0) -> dict[str, float]:
    """What the actor's forward says: its entropy (mean over valid tokens, nats), and its gap to the rollout.

    Where both engines' log-probs are of the same weights (and the same temperature), the gap is numerics alone; a large
    one means that sampling and training disagree about the policy. Where the rollout's weights were older, the gap has
    the policy's own change in it, and its metrics other names, ``training/stale_rollout_*``. Empty where there was no
    such forward (bypass mode).

    Args:
        weight_age: updates of the actor that the rollout's weights lacked.
    """
    assert batch.batch is not None
    if "entropys" not in batch.batch:
        return {}
    mask = batch.batch["response_mask"].bool()
    rollout, trained = batch.batch["rollout_log_probs"][mask], batch.batch["old_log_probs"][mask]
    probs_gap = (rollout.exp() - trained.exp()).abs()
    log_gap = (rollout - trained).abs()
    gap = "training/stale_rollout" if weight_age else "training/rollout"
    return {
        "actor/old_entropy": float(masked_mean(batch.batch["entropys"], mask)),
        f"{gap}_probs_diff_mean": float(probs_gap.mean()),
        f"{gap}_probs_diff_max": float(probs_gap.max()),
        f"{gap}_probs_diff_std": float(probs_gap.std(correction=0)),
        f"{gap}_log_probs_diff_mean": float(log_gap.mean()),
        f"{gap}_log_probs_diff_max": float(log_gap.max()),
    }


def update_metrics(role: str, updates: list[dict[str, float]]) -> dict[str, float]:
    """The optimizer steps of one iteration as one: the mean of each metric, the largest of those named ``*_max``.

    The loss functions name their metrics in full; the engine's own (grad_norm, lr) get the role's name. A step that
    was not made has none.
    """
    metrics = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        key = name if "/" in name else f"{role}/{name}"
        metrics[key] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return metrics


def memory_metrics(groups: Mapping[str, WorkerGroup | RolloutClient]) -> dict[str, float]:
    """``perf/memory/ROLE/rss_gb`` of the process of each role, the largest of its ranks, and the driver's.

    And ``perf/memory/ROLE/PHASE/peak_rss_gb``, the most that the process had while the role was at it. On CUDA
    ``device_gb`` and ``peak_device_gb`` too. What a process has, all roles in it have.
    """
    metrics = {f"perf/memory/driver/{name}": value for name, value in memory_used().items() if name == "rss_gb"}
    for role, group in groups.items():
        for rank in group.memory_used():
            for name, value in rank.items():
                method, _, what = name.rpartition("/")
                phase = phase_of(method) if method else ""
                if method and not phase:  # nothing that takes memory
                    continue
                key = "/".join(filter(None, ("perf/memory", role, phase, what)))
                metrics[key] = max(value, metrics.get(key, 0.0))
    return metrics


def throughput_metrics(batch: DataProto, seconds: float, ranks: int) -> dict[str, float]:
    """Tokens (prompt and response) a second and rank over the whole step."""
    assert batch.batch is not None
    tokens = int(batch.batch["attention_mask"].sum())
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds / ranks,
    }


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    values = values.float()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
