"""The worker classes of a PPO run with their arguments, from the configuration and its plan."""

import importlib.util
from typing import Any

from transformers import AutoModel, AutoModelForCausalLM

from podium.models.hf import load_hf_config
from podium.models.lora import LoRA, check_lora
from podium.protocol import ClassWithInitArgs
from podium.trainer.config.ppo import PPOConfig
from podium.trainer.config.reward import RewardModelConfig
from podium.trainer.ppo.objectives import PolicyObjective, ValueObjective
from podium.trainer.ppo.plan import Plan
from podium.utils.errors import UserError
from podium.utils.tokenizer import stop_token_ids
from podium.workers.actor import ActorWorker
from podium.workers.critic import CriticWorker
from podium.workers.judge import JudgeWorker
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
        _check_reward_model(config.reward_model, device)
    _check_width(config.data, "data", hf_config, model.path)
    check_rollout(rollout.name, hf_config, device, "actor_rollout_ref.rollout.name")
    text_config = hf_config.get_text_config()
    has_experts = getattr(text_config, "num_experts", None) or getattr(text_config, "num_local_experts", None)
    if rollout.weight_sync.adapter_only and device == "cpu" and has_experts:
        raise UserError(
            "actor_rollout_ref.rollout.weight_sync.adapter_only=true: vLLM on a CPU runs no mixture of experts with an "
            "adapter; leave it out, and merged weights are sent"
        )


def _check_width(lengths: Any, key: str, hf_config: Any, path: str) -> None:
    """Whether the model has positions for the longest prompt and response together."""
    prompt, response = lengths.max_prompt_length, lengths.max_response_length
    longest = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and prompt + response > longest:
        raise UserError(
            f"{key}.max_prompt_length={prompt} + {key}.max_response_length={response} = {prompt + response} tokens, "
            f"but the model at {path} has {longest} positions"
        )


def _check_reward_model(config: RewardModelConfig, device: str) -> None:
    model, key = config.model, "reward_model.model.path"
    generative = config.style == "generative"
    if not model.path:
        trained = "a directory that main_rm wrote, or another reward model with one label"
        raise UserError(f"{key} is not set: {'the model that judges' if generative else trained}")
    hf_config = load_hf_config(model.path, key, model.trust_remote_code)
    if generative:
        _check_width(config.judge, "reward_model.judge", hf_config, model.path)
        check_rollout(config.rollout.name, hf_config, device, "reward_model.rollout.name")
    elif hf_config.num_labels != 1:
        raise UserError(
            f"{key}={model.path}: {(hf_config.architectures or ['the model'])[0]} has {hf_config.num_labels} labels; "
            "give a reward model, which has one"
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


def build_roles(
    config: PPOConfig, plan: Plan, tokenizer: Any, judge_tokenizer: Any = None
) -> dict[str, ClassWithInitArgs]:
    """Roles by name, in the order in which a process builds them: what is trained first, the rollout last.

    Args:
        tokenizer: the policy's.
        judge_tokenizer: of a generative reward model.
    """
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
        roles["reward_model"] = _reward_role(config.reward_model, plan, judge_tokenizer, config.trainer.seed)
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
        free_cache=rollout.free_cache_engine,
    )
    return roles


def _reward_role(config: RewardModelConfig, plan: Plan, tokenizer: Any, seed: int) -> ClassWithInitArgs:
    model = config.model
    assert model.path is not None, "check_models comes first"
    if config.style != "generative":
        return ClassWithInitArgs(RewardModelWorker, model, config.strategy, config, infer_rows=plan.reward_micro_rows)
    return ClassWithInitArgs(
        JudgeWorker,
        model.path,
        config.rollout,
        max_prompt_length=config.judge.max_prompt_length,
        max_response_length=config.judge.max_response_length,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=stop_token_ids(model.path, tokenizer),
        seed=seed,
        trust_remote_code=model.trust_remote_code,
    )
