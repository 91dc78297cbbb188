"""The worker classes of a PPO run with their arguments, from the configuration and its plan."""

import importlib.util
from typing import Any

from transformers import AutoModel, AutoModelForCausalLM

from podium.models.hf import load_hf_config
from podium.models.lora import LoRA, check_lora
from podium.protocol import ClassWithInitArgs
from podium.trainer.config.ppo import PPOConfig
from podium.trainer.ppo.objectives import PolicyObjective, ValueObjective
from podium.trainer.ppo.plan import Plan
from podium.utils.errors import UserError
from podium.utils.tokenizer import load_tokenizer, stop_token_ids
from podium.workers.actor import ActorWorker
from podium.workers.critic import CriticWorker
from podium.workers.reference import ReferenceWorker
from podium.workers.reward_model import RewardModelWorker
from podium.workers.rollout.worker import RolloutWorker


def check_models(config: PPOConfig, device: str) -> None:
    """Finds out what would otherwise fail minutes later, in a worker.

    Raises:
        UserError: a model that is not there, a rollout engine that is not installed or cannot run the model.
    """
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    hf_config = load_hf_config(model.path, "actor_rollout_ref.model.path", model.trust_remote_code)
    check_lora(hf_config, model, AutoModelForCausalLM, "actor_rollout_ref.model")
    critic = config.critic.model
    critic_config = load_hf_config(critic.path, "critic.model.path", critic.trust_remote_code) if critic.path else None
    check_lora(critic_config or hf_config, critic, AutoModel, "critic.model")
    if config.reward_model.enable:
        _check_reward_model(config.reward_model.model)
    width = config.data.max_prompt_length + config.data.max_response_length
    text_config = hf_config.get_text_config()
    longest = getattr(text_config, "max_position_embeddings", None)
    if longest is not None and width > longest:
        raise UserError(
            f"data.max_prompt_length={config.data.max_prompt_length} + data.max_response_length="
            f"{config.data.max_response_length} = {width} tokens, but the model at {model.path} has {longest} positions"
        )
    check_rollout(rollout.name, hf_config, device, "actor_rollout_ref.rollout.name")


def _check_reward_model(model: Any) -> None:
    key = "reward_model.model.path"
    if not model.path:
        raise UserError(f"{key} is not set: a directory that main_rm wrote, or another reward model with one label")
    hf_config = load_hf_config(model.path, key, model.trust_remote_code)
    if hf_config.num_labels != 1:
        raise UserError(
            f"{key}={model.path}: {(hf_config.architectures or ['the model'])[0]} has {hf_config.num_labels} labels; "
            "give a reward model, which has one"
        )


def check_reward_tokenizer(model: Any, tokenizer: Any) -> None:
    """The reward model reads the policy's tokens, so both must mean the same by them.

    Raises:
        UserError: they do not.
    """
    key = "reward_model.model.path"
    theirs = load_tokenizer(model.path, model.trust_remote_code, key=key)
    ours = tokenizer.get_vocab()
    if theirs.get_vocab() != ours or theirs.eos_token_id != tokenizer.eos_token_id:
        raise UserError(
            f"{key}={model.path}: its tokenizer is not that of actor_rollout_ref.model.path (vocabulary of "
            f"{len(theirs)} and {len(tokenizer)} tokens, end-of-sequence {theirs.eos_token!r} and "
            f"{tokenizer.eos_token!r}); train a reward model on the policy's own base model"
        )


def check_rollout(name: str, hf_config: Any, device: str, key: str) -> None:
    """Finds out whether the rollout engine can run the model.

    Raises:
        UserError: it is not installed, or cannot.
    """
    if name != "vllm":
        return
    if importlib.util.find_spec("vllm") is None:
        extra = "vllm" if device == "cuda" else "cpu"
        raise UserError(f"{key}=vllm, but vllm is not installed: pip install 'podium[{extra}]', or use {key}=hf")
    text_config = hf_config.get_text_config()
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    if device == "cpu" and head_dim % 32:
        raise UserError(f"the model's head_dim is {head_dim}, and vLLM on a CPU takes multiples of 32: use {key}=hf")


def build_roles(config: PPOConfig, plan: Plan, tokenizer: Any) -> dict[str, ClassWithInitArgs]:
    """Roles by name, in the order in which a process builds them: what is trained first, the rollout last."""
    actor_rollout_ref, data = config.actor_rollout_ref, config.data
    actor, rollout = actor_rollout_ref.actor, actor_rollout_ref.rollout
    roles = {
        "actor": ClassWithInitArgs(
            ActorWorker,
            actor_rollout_ref.model,
            actor,
            PolicyObjective.from_config(actor, config.trainer.plugins),
            temperature=rollout.temperature,
            entropy_grad=actor.entropy_coeff != 0,
            sum_pi_squared=plan.use_sum_pi_squared,
            mini_batch_rows=plan.actor_mini_rows // plan.actor_shards,
            micro_batch_rows=plan.actor_micro_rows,
            infer_rows=plan.log_prob_micro_rows,
            ref_rows=plan.ref_micro_rows,
            seed=config.trainer.seed,
            sync_adapter=rollout.weight_sync.adapter_only,
            epochs=actor.ppo_epochs,
            total_steps=plan.actor_updates,
        )
    }
    if plan.use_critic:
        roles["critic"] = ClassWithInitArgs(
            CriticWorker,
            config.critic.model.path or actor_rollout_ref.model.path,
            config.critic,
            ValueObjective(config.critic),
            seed=config.trainer.seed,
            mini_batch_rows=plan.critic_mini_rows // plan.critic_shards,
            micro_batch_rows=plan.critic_micro_rows,
            epochs=plan.critic_epochs,
            total_steps=plan.critic_updates,
        )
    if plan.use_reference and not plan.reference_is_base:
        roles["ref"] = ClassWithInitArgs(
            ReferenceWorker,
            actor_rollout_ref.model,
            actor.strategy,
            actor_rollout_ref.ref,
            temperature=rollout.temperature,
            infer_rows=plan.ref_micro_rows,
        )
    if plan.use_reward_model:
        roles["reward_model"] = ClassWithInitArgs(
            RewardModelWorker,
            config.reward_model.model,
            config.reward_model.strategy,
            config.reward_model,
            infer_rows=plan.reward_micro_rows,
        )
    roles["rollout"] = ClassWithInitArgs(
        RolloutWorker,
        actor_rollout_ref.model.path,
        rollout,
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=stop_token_ids(actor_rollout_ref.model.path, tokenizer),
        seed=config.trainer.seed,
        trust_remote_code=actor_rollout_ref.model.trust_remote_code,
        lora=LoRA.from_config(actor_rollout_ref.model, 0) if rollout.weight_sync.adapter_only else None,
    )
    return roles
