"""Typed configuration. Imports without torch, ray or vllm."""

from podium.trainer.config.check import (
    check_config,
    check_eval_config,
    check_generate_config,
    check_rm_config,
    check_sft_config,
)
from podium.trainer.config.generate import EvalConfig, GenerateConfig
from podium.trainer.config.load import load_config, parse_command_line
from podium.trainer.config.ppo import PPOConfig
from podium.trainer.config.rm import RMConfig
from podium.trainer.config.sft import SFTConfig

__all__ = [
    "EvalConfig",
    "GenerateConfig",
    "PPOConfig",
    "RMConfig",
    "SFTConfig",
    "check_config",
    "check_eval_config",
    "check_generate_config",
    "check_rm_config",
    "check_sft_config",
    "load_config",
    "parse_command_line",
]
