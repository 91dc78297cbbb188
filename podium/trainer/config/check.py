"""Keys that are legal but wrong: values outside their choices, and keys that the chosen mode would ignore."""

from podium.trainer.config.engines import check_layouts, engine_rules, ppo_engine_rules
from podium.trainer.config.generate import EvalConfig, GenerateConfig
from podium.trainer.config.lora import check_adapter_only, lora_rules
from podium.trainer.config.methods import check_methods, method_rules
from podium.trainer.config.placement import (
    check_tensor_parallel,
    check_transport,
    placement_rules,
    reward_ranks,
    rollout_ranks,
)
from podium.trainer.config.ppo import DataConfig, PPOConfig
from podium.trainer.config.reward import ScoringConfig
from podium.trainer.config.rm import RMConfig
from podium.trainer.config.rollout import GenerationConfig
from podium.trainer.config.scoring import check_scoring, has_function, scoring_rules
from podium.trainer.config.sft import SFTConfig
from podium.trainer.config.shared import CheckpointConfig, MegatronConfig, OptimConfig
from podium.trainer.config.values import check_values
from podium.utils.errors import UserError

# Keys of the reward model that only one style of it reads.
_DISCRIMINATIVE = ["strategy", "micro_batch_size_per_gpu", "fsdp_config", "megatron"]
_GENERATIVE = ["judge", "rollout"]
_KL_CONTROL = ("kl_ctrl.type", "kl_ctrl.horizon", "kl_ctrl.target_kl")


def check_config(config: PPOConfig, explicit: set[str]) -> None:
    """Refuses what cannot be meant.

    Args:
        explicit: the keys that the user set.

    Raises:
        UserError: names the key and what to do.
    """
    check_values(config)
    if config.actor_rollout_ref.rollout.temperature <= 0:
        raise UserError(
            f"actor_rollout_ref.rollout.temperature={config.actor_rollout_ref.rollout.temperature}: training needs "
            "sampled responses, so it must be above 0 (val_kwargs.temperature=0 is greedy validation)"
        )
    rollout_ranks(config.actor_rollout_ref.rollout, config.trainer.nnodes * config.trainer.n_gpus_per_node)
    _check_reward_ranks(config)
    check_transport(config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.strategy)
    check_adapter_only(config.actor_rollout_ref)
    _check_frequency(config)
    check_methods(config)
    _check_checkpoints(config.trainer, config.trainer.test_freq)
    save_freq, sync_freq = config.trainer.save_freq, config.actor_rollout_ref.rollout.weight_sync.frequency
    if save_freq > 0 and save_freq % sync_freq:
        raise UserError(
            f"trainer.save_freq={save_freq} is no multiple of actor_rollout_ref.rollout.weight_sync.frequency="
            f"{sync_freq}: a run that goes on from a checkpoint begins with a sync"
        )
    check_scoring(config.reward_model, config.custom_reward_function)
    if config.reward_model.reward_manager == "dapo" and not config.reward_model.overlong_buffer.enable:
        raise UserError("reward_model.reward_manager=dapo is the penalty for length: set overlong_buffer.enable=true")
    _refuse_ignored(explicit, [*method_rules(config), *_without_effect(config), *ppo_engine_rules(config)])
    check_layouts(config)
    validation = config.actor_rollout_ref.rollout.val_kwargs
    if validation.n > 1 and validation.temperature == 0:
        raise UserError(
            f"actor_rollout_ref.rollout.val_kwargs.n={validation.n}: greedy validation gives one answer each time; "
            "set val_kwargs.temperature above 0, or n=1"
        )


def _check_reward_ranks(config: PPOConfig) -> None:
    ranks = reward_ranks(config.reward_model) or config.trainer.nnodes * config.trainer.n_gpus_per_node
    check_tensor_parallel(config.reward_model.rollout, "reward_model.rollout", ranks)


def _check_frequency(config: PPOConfig) -> None:
    """Validation and resuming need the step's weights: syncing out of turn for them would change what is learnt."""
    every = config.actor_rollout_ref.rollout.weight_sync.frequency
    for name in ("test_freq", "save_freq"):
        value = getattr(config.trainer, name)
        if value > 0 and value % every:
            raise UserError(
                f"trainer.{name}={value}: expected a multiple of actor_rollout_ref.rollout.weight_sync.frequency="
                f"{every}, so that the rollout then has the weights of that step"
            )


def check_sft_config(config: SFTConfig, explicit: set[str]) -> None:
    """As `check_config`, for supervised fine-tuning."""
    check_values(config)
    _check_checkpoints(config.trainer, config.trainer.test_freq)
    if config.data.packing and config.strategy != "fsdp":
        raise UserError(
            f"data.packing=true with strategy={config.strategy}: documents of a row are kept apart by the fsdp engine "
            "only; remove one of the two"
        )
    data, rules = config.data, _supervised_rules(config)
    if data.messages_key is None:
        rules.append(("data.max_length", "without data.messages_key"))
    else:
        leaves = ("prompt_key", "response_key", "max_prompt_length", "max_response_length")
        rules += [(f"data.{leaf}", "beside data.messages_key") for leaf in leaves]
    _refuse_ignored(explicit, rules)


def check_rm_config(config: RMConfig, explicit: set[str]) -> None:
    """As `check_config`, for reward models."""
    check_values(config)
    _check_checkpoints(config.trainer, config.trainer.test_freq)
    _refuse_ignored(explicit, _supervised_rules(config))


def check_generate_config(config: GenerateConfig, explicit: set[str]) -> None:
    """As `check_config`, for generation."""
    check_values(config)
    rollout = config.rollout
    check_tensor_parallel(rollout, "rollout", config.trainer.nnodes * config.trainer.n_gpus_per_node)
    if rollout.n > 1 and rollout.temperature == 0:
        raise UserError(
            f"rollout.n={rollout.n}: greedy generation gives one answer each time; set rollout.temperature above 0"
        )
    leaves = (
        "val_kwargs",
        "weight_sync",
        "free_cache_engine",
        "log_prob_micro_batch_size_per_gpu",
        "placement",
        "nnodes",
        "n_gpus_per_node",
        "max_restarts",
    )
    rules = [(f"rollout.{leaf}", "without a trainer") for leaf in leaves]
    trained = ("enable_gradient_checkpointing", "lora_rank", "lora_alpha", "target_modules")
    rules += [(f"model.{leaf}", "without a trainer") for leaf in trained]
    rules += placement_rules(rollout, "rollout") + _engine_rules(rollout, "rollout")
    if rollout.temperature == 0:
        rules += [(f"rollout.{leaf}", "with rollout.temperature=0") for leaf in ("top_p", "top_k")]
    _refuse_ignored(explicit, rules)


def check_eval_config(config: EvalConfig, explicit: set[str]) -> None:
    """As `check_config`, for evaluation."""
    check_values(config)
    if any(k < 1 for k in config.pass_k):
        raise UserError(f"pass_k={config.pass_k}: expected numbers of at least 1")
    check_scoring(config.reward_model, config.custom_reward_function)
    rules = scoring_rules(config.reward_model, config.custom_reward_function)
    if config.reward_model.reward_manager == "dapo":
        rules.append(("reward_model.reward_manager", "as dapo here: a penalty for length is for training"))
    _refuse_ignored(explicit, rules)


def _engine_rules(rollout: GenerationConfig, prefix: str) -> list[tuple[str, str]]:
    if rollout.name != "hf":
        return []
    return [(f"{prefix}.{leaf}", f"with {prefix}.name=hf") for leaf in ("gpu_memory_utilization", "enforce_eager")]


def _supervised_rules(config: SFTConfig | RMConfig) -> list[tuple[str, str]]:
    rules = [*_ignored_by_optimizer(config.optim, "optim"), *_ignored_by_checkpoints(config.trainer)]
    rules += engine_rules("", "strategy", config.strategy, config.megatron, MegatronConfig())
    rules += lora_rules(config.model, "model", config.strategy, "strategy")
    if not config.model.lora_rank:
        rules.append(("trainer.seed", "with model.lora_rank=0: nothing is drawn (data.seed is of the order)"))
    if not config.data.shuffle:
        rules.append(("data.seed", "with data.shuffle=false"))
    if not config.data.val_files:
        rules.append(("trainer.test_freq", "without data.val_files"))
    return rules


def _refuse_ignored(explicit: set[str], rules: list[tuple[str, str]]) -> None:
    for prefix, reason in rules:
        ignored = sorted(key for key in explicit if key == prefix or key.startswith(prefix + "."))
        if ignored:
            raise UserError(f"{ignored[0]} has no effect {reason}: remove it")


def _without_effect(config: PPOConfig) -> list[tuple[str, str]]:
    """Keys (or parents of keys) that this configuration never reads, and why."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    rules = []
    if algorithm.use_kl_in_reward is False:
        why = "with algorithm.use_kl_in_reward=false"
        rules += [("algorithm.kl_ctrl", why), ("algorithm.kl_penalty", why)]
    in_reward = algorithm.use_kl_in_reward or (algorithm.use_kl_in_reward is None and algorithm.kl_ctrl.kl_coef > 0)
    if not in_reward and not actor.use_kl_loss:
        rules.append(("actor_rollout_ref.ref", "without a KL (algorithm.kl_ctrl.kl_coef or actor.use_kl_loss)"))
    rules += _lora_rules(config)
    if not actor.use_kl_loss:
        why = "without actor_rollout_ref.actor.use_kl_loss=true"
        rules += [(f"actor_rollout_ref.actor.{leaf}", why) for leaf in ("kl_loss_coef", "kl_loss_type")]
    rollout = config.actor_rollout_ref.rollout
    rules += placement_rules(rollout, "actor_rollout_ref.rollout")
    rules += _engine_rules(rollout, "actor_rollout_ref.rollout")
    rules += scoring_rules(config.reward_model, config.custom_reward_function)
    rules += _reward_model_rules(config) + _data_rules(config.data)
    rules += _ignored_by_checkpoints(config.trainer)
    rules += _ignored_by_optimizer(actor.optim, "actor_rollout_ref.actor.optim")
    rules += _ignored_by_optimizer(config.critic.optim, "critic.optim")
    if not in_reward:
        why = "without a KL in the reward (algorithm.kl_ctrl.kl_coef)"
        rules += [(f"algorithm.{leaf}", why) for leaf in ("kl_penalty", *_KL_CONTROL)]
    elif algorithm.kl_ctrl.type == "fixed":
        rules += [(f"algorithm.{leaf}", "with algorithm.kl_ctrl.type=fixed") for leaf in _KL_CONTROL[1:]]
    if config.actor_rollout_ref.rollout.val_kwargs.temperature == 0:
        leaves = ("top_p", "top_k")
        why = "with greedy validation (val_kwargs.temperature=0)"
        rules += [(f"actor_rollout_ref.rollout.val_kwargs.{leaf}", why) for leaf in leaves]
    if not config.data.val_files:
        unread = ("data.val_batch_size", "trainer.log_val_generations", "actor_rollout_ref.rollout.val_kwargs")
        rules += [(key, "without data.val_files") for key in unread]
    return rules


def _lora_rules(config: PPOConfig) -> list[tuple[str, str]]:
    policy, critic = config.actor_rollout_ref, config.critic
    strategy = "actor_rollout_ref.actor.strategy"
    rules = lora_rules(policy.model, "actor_rollout_ref.model", policy.actor.strategy, strategy)
    rules += lora_rules(critic.model, "critic.model", critic.strategy, "critic.strategy")
    if policy.model.lora_rank:
        why = "with actor_rollout_ref.model.lora_rank: the reference is the actor's own frozen base"
        rules.append(("actor_rollout_ref.ref.fsdp_config", why))
    return rules


def _data_rules(data: DataConfig) -> list[tuple[str, str]]:
    rules = [
        (f"data.{plugin}.name", f"without data.{plugin}.path")
        for plugin in ("custom_cls", "sampler")
        if getattr(data, plugin).path is None
    ]
    if data.sampler.path is not None:
        rules += [(f"data.{leaf}", "with a data.sampler") for leaf in ("train_weights", "shuffle")]
    elif not data.shuffle:
        rules.append(("data.seed", "with data.shuffle=false"))
    return rules


def _reward_model_rules(config: PPOConfig) -> list[tuple[str, str]]:
    model, key = config.reward_model, "reward_model"
    if not model.enable:
        leaves = ["model", "normalize", "weight", "function_weight", "style", "enable_resource_pool", "nnodes"]
        leaves += ["n_gpus_per_node", *_DISCRIMINATIVE, *_GENERATIVE]
        return [(f"{key}.{leaf}", f"without {key}.enable=true") for leaf in leaves]
    unread = _DISCRIMINATIVE if model.style == "generative" else _GENERATIVE
    rules = [(f"{key}.{leaf}", f"with {key}.style={model.style}") for leaf in unread]
    if model.style == "generative":
        rules += _engine_rules(model.rollout, f"{key}.rollout")
        if model.rollout.temperature == 0:
            rules += [(f"{key}.rollout.{leaf}", f"with {key}.rollout.temperature=0") for leaf in ("top_p", "top_k")]
    if not model.enable_resource_pool:
        leaves = ["nnodes", "n_gpus_per_node"]
        rules += [(f"{key}.{leaf}", f"without {key}.enable_resource_pool=true") for leaf in leaves]
    if not has_function(model, config.custom_reward_function):
        why = "without a reward function beside the reward model"
        rules += [(f"{key}.{leaf}", why) for leaf in ("function_weight", *ScoringConfig.__dataclass_fields__)]
    return rules


def _check_checkpoints(trainer: CheckpointConfig, test_freq: int) -> None:
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        raise UserError("trainer.resume_mode=resume_path: set trainer.resume_from_path to a checkpoint")
    metric, save_freq = trainer.best_ckpt_metric, trainer.save_freq
    if metric and metric.startswith("val/") and save_freq > 0 and (test_freq < 1 or save_freq % test_freq):
        raise UserError(
            f"trainer.best_ckpt_metric={metric} is known where validation runs: trainer.test_freq={test_freq} must "
            f"divide trainer.save_freq={save_freq}"
        )


def _ignored_by_checkpoints(trainer: CheckpointConfig) -> list[tuple[str, str]]:
    rules = []
    if trainer.resume_mode != "resume_path":
        rules.append(("trainer.resume_from_path", f"with trainer.resume_mode={trainer.resume_mode}"))
    if trainer.save_freq < 1:
        why = "without trainer.save_freq: the last checkpoint is the only one"
        rules += [(f"trainer.{leaf}", why) for leaf in ("async_save", "max_ckpt_to_keep", "best_ckpt_metric")]
    if trainer.best_ckpt_metric is None:
        rules.append(("trainer.best_ckpt_mode", "without trainer.best_ckpt_metric"))
    return rules


def _ignored_by_optimizer(optim: OptimConfig, prefix: str) -> list[tuple[str, str]]:
    rules = []
    if optim.lr_warmup_steps >= 0:
        rules.append((f"{prefix}.lr_warmup_steps_ratio", f"beside {prefix}.lr_warmup_steps"))
    if optim.lr_scheduler_type == "constant":
        rules.append((f"{prefix}.min_lr_ratio", f"with {prefix}.lr_scheduler_type=constant"))
    return rules
