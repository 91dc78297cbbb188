"""How responses are generated, and how the weights get there."""

from dataclasses import dataclass, field


@dataclass
class ValKwargs:
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that have this probability together."""
    top_k: int = -1
    """Sample from so many of the likeliest tokens; -1 keeps the whole vocabulary."""
    n: int = 1
    """Responses for each validation prompt; their mean and best are reported."""


@dataclass
class WeightSyncConfig:
    transport: str = "auto"
    """How weights travel from the actor to the rollout: auto (by where they run) | colocated (within their processes) |
    memory_buffer (likewise, with the flat memory of a Megatron actor's stages) | ipc (shared memory of processes on one
    device) | broadcast (connections of its own, nccl's or, on a CPU, TCP) | cpu (a snapshot on each host) | sharded (a
    share on each rank), or the name of a weight buffer that a plug-in registers (docs/weight_sync.md)."""
    frequency: int = 1
    """Iterations between syncs: with k, responses come from weights up to k - 1 updates of the actor old."""
    adapter_only: bool = False
    """LoRA and vllm: send the adapter by itself, and let generation apply it at every layer: a small sync, a slower
    token. false sends the merged weights."""
    verify: str = "full"
    """Compare, bit for bit, what was sent with what generation uses: off | sample (an eighth each time) | full."""
    bucket_megabytes: int = 32
    """Most that is packed together and sent at once. A sync takes a few such buffers beside the weights: two for each
    pair of ranks that exchange and one to verify (docs/weight_sync.md says which transports take more)."""
    timeout_s: float = 300.0
    """Longest that a sync may take before the run stops and names who waits for whom."""


@dataclass
class GenerationConfig:
    name: str = "vllm"
    """vllm | hf (plain transformers)."""
    temperature: float = 1.0
    """Sampling temperature; training log-probs are taken at the same one."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that have this probability together."""
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    dtype: str = "float32"
    """Precision of generation: float32 | bfloat16."""
    tensor_model_parallel_size: int = 1
    """Ranks (consecutive ones) that share one copy of the rollout model."""
    gpu_memory_utilization: float = 0.5
    """vLLM's share of a GPU's memory."""
    max_num_seqs: int = 256
    """Most sequences decoded together on one rank."""
    enforce_eager: bool = True
    """No CUDA graphs."""


@dataclass
class RolloutConfig(GenerationConfig):
    n: int = 1
    """Responses for each prompt."""
    placement: str = "process"
    """Where it runs: process (in the actor's processes) | device (in processes of its own on the actor's devices) |
    apart (in processes of its own on nnodes x n_gpus_per_node devices of its own)."""
    nnodes: int = 1
    """Machines, with placement=apart."""
    n_gpus_per_node: int | None = None
    """Ranks on each of those machines: GPUs, or processes on a CPU machine."""
    max_restarts: int = 3
    """Times in a run that it is started anew and given the weights, without losing the step, after one of its processes
    died or did not answer (placement=device or apart; else they are the actor's, and trainer.max_restarts counts)."""
    free_cache_engine: bool = False
    """Give the rollout's memory back while the trainer works: the key-value cache, and the weights where new ones come
    before the next response. Taking it again costs some time in every step."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward for old log-probs; null takes the actor's ppo_micro_batch_size_per_gpu."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
