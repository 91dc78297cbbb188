"""Keys that verl has and Podium has not: what to do instead, for users who bring their scripts."""

_DEVICE = "not needed: batches are cut by ppo_micro_batch_size_per_gpu, which changes memory and never the result"
_ASYNC = "not offered: requests are served in the worker's own process"

INSTEAD = {
    "use_dynamic_bsz": _DEVICE,
    "ppo_max_token_len_per_gpu": _DEVICE,
    "log_prob_max_token_len_per_gpu": _DEVICE,
    "log_prob_use_dynamic_bsz": _DEVICE,
    "ppo_micro_batch_size": "use ppo_micro_batch_size_per_gpu (sequences on one rank)",
    "log_prob_micro_batch_size": "use log_prob_micro_batch_size_per_gpu (sequences on one rank)",
    "use_remove_padding": "not needed: columns that are padding in the whole micro-batch are cut",
    "ulysses_sequence_parallel_size": "not offered",
    "fsdp_size": "not offered: FSDP shards over all ranks",
    "exclude_modules": "not offered: list what to adapt in target_modules",
    "lora_adapter_path": "not offered: adapters start at zero (an export is merged: it can be the next model.path)",
    "reward_fn_key": "use data.column_names={data_source: COLUMN}",
    "load_format": "not needed: weights arrive with the first sync",
    "layered_summon": "not needed: weights are moved in flat buckets",
    "mode": _ASYNC,
    "agent": _ASYNC,
    "multi_turn": "not offered",
    "max_num_batched_tokens": "not offered: rollout.max_num_seqs bounds the batch",
    "max_model_len": "not needed: data.max_prompt_length + data.max_response_length",
    "disable_log_stats": "not needed: vLLM's own statistics are off",
    "enable_chunked_prefill": "not needed: the engine decides",
    "ignore_eos": "not offered: a response ends at the end-of-sequence token or at data.max_response_length",
    "do_sample": "use temperature (0 is greedy)",
    "ray_wait_register_center_timeout": "use trainer.deadlines.init_s",
    "balance_batch": "not needed: the result does not depend on which rank has which rows",
    "input_tokenizer": "not needed: a reward model with another tokenizer than the policy's reads the text",
    "launch_reward_fn_async": "not needed: responses are scored while others are still being generated",
    "default_hdfs_dir": "not offered: checkpoints go to trainer.default_local_dir",
    "rollout_data_dir": "not offered; validation samples are kept in val_samples.jsonl of the run directory",
    "ray_init": "set RAY_ADDRESS to join a cluster",
    "ray_kwargs": "set RAY_ADDRESS to join a cluster",
}
"""By any part of the key's dotted name."""


def instead_of(key: str) -> str | None:
    """What a verl user does in place of `key`; None where Podium has no word about it."""
    return next((INSTEAD[part] for part in reversed(key.split(".")) if part in INSTEAD), None)
