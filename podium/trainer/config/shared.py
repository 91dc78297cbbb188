"""Configuration pieces that more than one role uses. Names are verl's wherever the meaning is the same."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class OptimConfig:
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's denominator floor."""
    weight_decay: float = 0.01
    """Decoupled weight decay. Norms and biases are exempt."""
    lr_warmup_steps: int = -1
    """Optimizer steps of linear warm-up; -1 takes lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: float = 0.0
    """Warm-up as a share of all optimizer steps, used when lr_warmup_steps is -1."""
    lr_scheduler_type: str = "constant"
    """After warm-up: constant | cosine | linear."""
    min_lr_ratio: float = 0.0
    """Where cosine and linear decay end, as a share of lr."""


@dataclass
class FSDPConfig:
    model_dtype: str = "float32"
    """Precision of the master weights and the optimizer state: float32 | bfloat16."""
    dtype: str = "float32"
    """Precision of forward and backward (FSDP mixed precision): float32 | bfloat16. Gradients: float32."""
    reshard_after_forward: bool = True
    """Free gathered parameters after forward (ZeRO-3); false keeps them until backward ends (ZeRO-2)."""
    param_offload: bool = False
    """Keep the parameters in host memory but while the role computes with them, or hands them to the rollout."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in host memory but while the role trains, saves or loads."""


@dataclass
class MegatronConfig:
    # Roles that share processes share a layout: what critic, reference and reward model do not set is as for the actor.
    dtype: str = "float32"
    """Precision of forward and backward: float32 | bfloat16. Gradients, master weights and optimizer state: float32."""
    tensor_model_parallel_size: int = 1
    """Ranks that split every layer's matrices and the vocabulary."""
    pipeline_model_parallel_size: int = 1
    """Ranks that split the layers, each a stage of consecutive ones."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Pieces of the model on each pipeline rank (interleaved 1F1B: shorter bubbles); null is one."""
    pipeline_stage_layers: list[int] | None = None
    """Layers of each stage (of each virtual one, in the order of the model) where the split is uneven; null is even."""
    context_parallel_size: int = 1
    """Ranks that split every sequence."""
    expert_model_parallel_size: int = 1
    """Ranks that split the experts of a mixture; they are taken from the data-parallel ranks."""
    sequence_parallel: bool = False
    """Split the activations between the matrices of a layer over the tensor-parallel ranks: less memory."""
    use_remove_padding: bool = False
    """Lay the rows of a micro-batch end to end instead of padding them to the longest."""
    param_offload: bool = False
    """Keep the parameters in host memory but while the role computes with them, or hands them to the rollout."""
    optimizer_offload: bool = False
    """Keep the optimizer's state and master weights in host memory but while the role trains, saves or loads."""
    grad_offload: bool = False
    """Free the gradients' memory but while the role trains."""


@dataclass
class LoRAConfig:
    lora_rank: int = 0
    """LoRA: train adapters of this rank on the frozen model (pip install 'podium[lora]'); 0 trains all weights."""
    lora_alpha: int = 16
    """LoRA: the adapters' product counts lora_alpha / lora_rank times."""
    target_modules: Any = "all-linear"
    """LoRA: all-linear (but the head over the vocabulary), or a list of names of linear layers: [q_proj,v_proj]."""


@dataclass
class ModelConfig(LoRAConfig):
    path: str = ""
    """Hugging Face directory (or cached hub name) of the policy. Required."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more compute."""


@dataclass
class TrackingConfig:
    project_name: str = "podium"
    """Project in trackers that group runs."""
    experiment_name: str = "run"
    """Run name in trackers."""
    default_local_dir: str = "runs/podium"
    """Run directory: metrics.jsonl, checkpoints, export, samples."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Any of console, tensorboard, wandb. metrics.jsonl is always written."""


@dataclass
class WorkersConfig:
    """Where the workers run."""

    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int = 1
    """Ranks on each machine: GPUs, or processes on a CPU machine."""
    device: str = "auto"
    """auto | cpu | cuda."""
    backend: str = "ray"
    """Who runs the workers: ray | local (this process for one rank, spawned processes for several)."""
    rpc_timeout_s: float = 1800.0
    """Longest that a call to the workers may take before the run stops and names who is late; deadlines: by phase."""


@dataclass
class DeadlinesConfig:
    """The longest that calls to the workers may take, by what they do. What is null has trainer.rpc_timeout_s.

    Other waits have keys of their own: a weight sync actor_rollout_ref.rollout.weight_sync.timeout_s, a reward function
    reward_model.timeout_s, the step in hand after SIGTERM trainer.preempt_grace_s.
    """

    init_s: float | None = None
    """Seconds to start the processes' roles, and again to load the models."""


@dataclass
class SupervisedDeadlinesConfig(DeadlinesConfig):
    forward_s: float | None = None
    """Seconds for a batch without gradients: log-probs, values, scores in validation."""
    update_s: float | None = None
    """Seconds for the optimizer steps of a batch."""
    save_s: float | None = None
    """Seconds to write a checkpoint or an export, or to read one."""


@dataclass
class ChatConfig:
    """How chat lists become text (docs/data.md)."""

    chat_template: str | None = None
    """File with a Jinja chat template; null takes the tokenizer's own. The export keeps it."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the template, such as enable_thinking."""
    system_prompt: str | None = None
    """First message of every chat that has no system message of its own."""


@dataclass
class CheckpointConfig:
    resume_mode: str = "auto"
    """auto: go on from the newest checkpoint of default_local_dir, or start where there is none | disable: start, and
    refuse a directory with checkpoints | resume_path: go on from resume_from_path."""
    resume_from_path: str | None = None
    """A checkpoint (.../global_step_N), or a run directory, whose newest is taken."""
    save_freq: int = -1
    """Steps between checkpoints; -1 saves at the end only."""
    async_save: bool = False
    """Copy what is to be saved and write it while the run goes on; takes the memory of the copy."""
    max_ckpt_to_keep: int | None = None
    """Newest checkpoints to keep; null keeps all."""
    best_ckpt_metric: str | None = None
    """A step's metric, such as val/score/mean: the checkpoint with the best is kept too, and named in
    best_checkpointed_iteration.txt."""
    best_ckpt_mode: str = "max"
    """Which is best: max | min."""
    max_bad_steps: int = 3
    """Optimizer steps in a row without a finite loss and gradient at which the run ends. Each is skipped, counted
    (actor/skipped_steps, ...), and its batch kept in bad_steps/."""
    preempt_grace_s: float = 30.0
    """Seconds from SIGTERM in which the step in hand is finished and saved (exit code 143); a step that takes longer is
    given up, and the run goes on from the checkpoint before it."""
