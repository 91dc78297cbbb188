"""What actor and critic minimise, put together from the configuration."""

import cloudpickle
import pytest
import torch

from podium.trainer.config.training import ActorConfig, CriticConfig
from podium.trainer.ppo.aggregation import Denominator
from podium.trainer.ppo.kl import kl_penalty
from podium.trainer.ppo.losses import LOSS_AGG_MODES, agg_loss, compute_policy_loss_vanilla
from podium.trainer.ppo.objectives import PolicyObjective, ValueObjective
from podium.utils.errors import UserError


def make(rows: int = 5, width: int = 4) -> tuple[dict, dict]:
    torch.manual_seed(0)
    mask = torch.arange(width) < torch.tensor([4, 1, 3, 2, 4])[:rows, None]
    log_probs = torch.randn(rows, width, dtype=torch.float64) - 2
    outputs = {"log_probs": log_probs, "entropy": torch.rand_like(log_probs), "values": torch.randn_like(log_probs)}
    batch = {
        "response_mask": mask,
        "old_log_probs": log_probs + 0.3 * torch.randn_like(log_probs),
        "ref_log_prob": log_probs + 0.3 * torch.randn_like(log_probs),
        "advantages": torch.randn_like(log_probs),
        "returns": torch.randn_like(log_probs),
        "values": torch.randn_like(log_probs),
    }
    return outputs, batch


def actor(**changes) -> PolicyObjective:
    return PolicyObjective.from_config(ActorConfig(**changes))


def test_loss_less_entropy_plus_kl():
    outputs, batch = make()
    mask, denominator = batch["response_mask"], Denominator.from_mask(batch["response_mask"])
    config = ActorConfig(entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.7, kl_loss_type="k3")
    loss, metrics = PolicyObjective.from_config(config)(outputs, batch, denominator)
    pg, _ = compute_policy_loss_vanilla(
        batch["old_log_probs"], outputs["log_probs"], batch["advantages"], mask, config=config
    )
    kl = agg_loss(kl_penalty(outputs["log_probs"], batch["ref_log_prob"], "k3"), mask, "token-mean")
    entropy = agg_loss(outputs["entropy"], mask, "token-mean")
    torch.testing.assert_close(loss, pg - 0.3 * entropy + 0.7 * kl)
    torch.testing.assert_close(metrics["actor/pg_loss"], pg)
    assert float(metrics["actor/entropy"]) == pytest.approx(float(entropy))
    assert float(metrics["actor/kl_loss"]) == pytest.approx(float(kl))


def test_without_them_neither_counts_nor_is_the_reference_read():
    outputs, batch = make()
    del batch["ref_log_prob"]
    loss, metrics = actor()(outputs, batch, Denominator.from_mask(batch["response_mask"]))
    torch.testing.assert_close(loss, metrics["actor/pg_loss"])
    assert "actor/entropy" in metrics and "actor/kl_loss" not in metrics


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_shares_of_micro_batches_add_up(mode, role):
    outputs, batch = make()
    denominator = Denominator.from_mask(batch["response_mask"])
    objective = (
        actor(loss_agg_mode=mode, entropy_coeff=0.1, use_kl_loss=True)
        if role == "actor"
        else ValueObjective(CriticConfig(loss_agg_mode=mode))
    )

    def part(start: int, end: int):
        cut = ({k: v[start:end] for k, v in tensors.items()} for tensors in (outputs, batch))
        return objective(*cut, denominator)

    whole, whole_metrics = part(0, 5)
    parts = [part(0, 2), part(2, 3), part(3, 5)]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    for name, value in whole_metrics.items():
        values = [metrics[name] for _, metrics in parts]
        combined = max(values) if name.endswith("_max") else sum(values)
        torch.testing.assert_close(combined, value)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_masked_slots_do_not_matter(role):
    outputs, batch = make()
    objective = actor(entropy_coeff=0.1, use_kl_loss=True) if role == "actor" else ValueObjective(CriticConfig())
    denominator = Denominator.from_mask(batch["response_mask"])

    def poisoned(value: torch.Tensor) -> torch.Tensor:
        return value if value.dtype == torch.bool else torch.where(batch["response_mask"], value, float("nan"))

    clean, metrics = objective(outputs, batch, denominator)
    leaf = {name: poisoned(value).requires_grad_() for name, value in outputs.items()}
    loss, same = objective(leaf, {name: poisoned(value) for name, value in batch.items()}, denominator)
    torch.testing.assert_close(loss, clean)
    assert {name: float(value) for name, value in same.items()} == {
        name: float(value) for name, value in metrics.items()
    }
    loss.backward()
    for value in leaf.values():
        if value.grad is not None:
            assert torch.isfinite(value.grad).all() and not value.grad[~batch["response_mask"]].any()


def test_importance_weights_reach_the_loss():
    outputs, batch = make()
    denominator = Denominator.from_mask(batch["response_mask"])
    plain, _ = actor()(outputs, batch, denominator)
    batch["rollout_is_weights"] = torch.full_like(batch["advantages"], 2.0)
    torch.testing.assert_close(actor()(outputs, batch, denominator)[0], 2 * plain)


def test_the_value_loss_is_clipped_as_configured():
    outputs, batch = make()
    denominator = Denominator.from_mask(batch["response_mask"])
    free, free_metrics = ValueObjective(CriticConfig(cliprange_value=None))(outputs, batch, denominator)
    error = (outputs["values"] - batch["returns"])[batch["response_mask"]]
    torch.testing.assert_close(free, 0.5 * error.square().mean())
    tight, tight_metrics = ValueObjective(CriticConfig(cliprange_value=0.1))(outputs, batch, denominator)
    assert tight >= free and tight_metrics["critic/vf_clipfrac"] > free_metrics["critic/vf_clipfrac"] == 0
    torch.testing.assert_close(tight, tight_metrics["critic/vf_loss"])


def test_it_travels():
    outputs, batch = make()
    denominator = Denominator.from_mask(batch["response_mask"])
    objective = actor(entropy_coeff=0.1)
    there = cloudpickle.loads(cloudpickle.dumps(objective))
    torch.testing.assert_close(there(outputs, batch, denominator)[0], objective(outputs, batch, denominator)[0])


def test_an_unknown_loss_names_its_key():
    config = ActorConfig()
    config.policy_loss.loss_mode = "vanila"
    with pytest.raises(
        UserError, match=r"actor_rollout_ref.actor.policy_loss.loss_mode 'vanila'; did you mean 'vanilla'"
    ):
        PolicyObjective.from_config(config)
