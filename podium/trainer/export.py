"""``podium export``: an ordinary Hugging Face directory from a checkpoint of any engine and layout."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.trainer.config import PPOConfig, RMConfig, SFTConfig
from podium.utils.errors import UserError

_TOLERANCE = 1e-3
# What scores may have been given secrets, which are not there any more.
_NOT_NEEDED = ("custom_reward_function", "reward_model")
_PROBE_ROWS, _PROBE_TOKENS = 4, 16


def main(arguments: Sequence[str]) -> None:
    """Reads the command line and exports."""
    parser = argparse.ArgumentParser(prog="podium export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint (.../global_step_N), or a run directory")
    parser.add_argument("out", type=Path, help="the directory to write; it must not exist, or be empty")
    parser.add_argument("--role", default=None, help="what to export where there are several (default: actor)")
    parser.add_argument("--check", action="store_true", help="load both, and compare what they compute")
    options = parser.parse_args(arguments)
    export(options.checkpoint, options.out, options.role, check=options.check)


def export(checkpoint: Path, out: Path, role: str | None = None, *, check: bool = False) -> None:
    """Writes model, tokenizer and generation config of a checkpoint, after every file of it was compared with its sum.

    Args:
        role: a folder of the checkpoint; None is the actor, or the only one.
        check: compare the log-probs (or scores) of the trained engine with those of transformers on what was written.

    Raises:
        UserError: a damaged checkpoint, a role that it has not, a directory in use, or a difference.
    """
    from podium.trainer.chat import load_chat_tokenizer
    from podium.trainer.resume import read_checkpoint
    from podium.workers.engine.build import build_engine

    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: give a directory that does not exist")
    resume = read_checkpoint(checkpoint)
    role = role or ("actor" if (resume.folder / "actor").is_dir() else "reward_model")
    if not (resume.folder / role).is_dir():
        there = ", ".join(sorted(path.name for path in resume.folder.iterdir() if path.is_dir()))
        raise UserError(f"--role {role}: {resume.folder} has {there}")
    config = typed({name: section for name, section in resume.config.items() if name not in _NOT_NEEDED})
    trained, model = _parts(config, role)
    tokenizer = load_chat_tokenizer(model.path, config.data, model.trust_remote_code, "model.path")
    engine = build_engine(trained.strategy, _one_rank(trained), model)
    engine.load(str(resume.folder / role))
    engine.save_hf(str(out))
    tokenizer.save_pretrained(out)
    print(f"{role} of {resume.folder} written to {out}", flush=True)
    if check:
        difference = _difference(engine, out, role, len(tokenizer))
        if difference > _TOLERANCE:
            raise UserError(f"{out} differs from {resume.folder}: {difference:.3g} nats on random tokens")
        print(f"check: at most {difference:.2g} between the two on {_PROBE_ROWS} rows of random tokens")


def typed(plain: Mapping[str, Any]) -> Any:
    """The configuration that a checkpoint holds as plain values, with what they refer to in the environment.

    Raises:
        UserError: a variable that is not set.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationResolutionError

    if "actor_rollout_ref" in plain:
        kind: type = PPOConfig
    else:
        kind = RMConfig if "chosen_key" in plain["data"] else SFTConfig
    known = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in plain.items() if name in known}
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), values))
    except InterpolationResolutionError as error:
        raise UserError(
            f"{error.full_key}: {str(error).splitlines()[0]}; it was set when the configuration was written down"
        ) from None


def _parts(config: Any, role: str) -> tuple[Any, Any]:
    """What a role was trained with (``strategy`` and the engine's section), and what it was made from."""
    from podium.workers.engine.spec import LogProbs, ModelSpec, Scores, Values

    seed = config.trainer.seed
    if isinstance(config, PPOConfig):
        policy = config.actor_rollout_ref.model
        if role == "critic":
            path = config.critic.model.path or policy.path
            return config.critic, ModelSpec.trained(config.critic.model, Values(), seed, path)
        return config.actor_rollout_ref.actor, ModelSpec.trained(policy, LogProbs(), seed)
    outputs = Scores(has_head=False) if isinstance(config, RMConfig) else LogProbs()
    return config, ModelSpec.trained(config.model, outputs, seed)


def _one_rank(config: Any) -> Any:
    """The same with the layout of one rank: checkpoints do not depend on it."""
    from podium.trainer.config.shared import MegatronConfig

    return dataclasses.replace(config, megatron=MegatronConfig(dtype=config.megatron.dtype or "float32"))


def _difference(engine: Any, out: Path, role: str, vocabulary: int) -> float:
    """The largest difference between the engine's outputs and transformers', on random tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    ids = torch.randint(vocabulary, (_PROBE_ROWS, 2 * _PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(ids, dtype=torch.bool)
    batch = {
        "input_ids": ids,
        "attention_mask": ones,
        "position_ids": torch.arange(ids.shape[1]).expand_as(ids),
        "responses": ids[:, _PROBE_TOKENS:],
        "response_mask": ones[:, _PROBE_TOKENS:],
    }
    mine = engine.infer(batch, _PROBE_ROWS)
    with torch.no_grad():
        if role == "actor":
            model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
            log_probs = torch.log_softmax(model(input_ids=ids).logits[:, _PROBE_TOKENS - 1 : -1].float(), dim=-1)
            theirs, ours = log_probs.gather(-1, batch["responses"][..., None])[..., 0], mine["log_probs"]
        else:
            value = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
            hidden = value.base_model(input_ids=ids).last_hidden_state
            scores = value.score(hidden)[..., 0].float()
            shift = (
                1 if "values" in mine else 0
            )  # a value is of the state before the token, a score of what ends with it
            theirs = scores[:, _PROBE_TOKENS - shift : ids.shape[1] - shift]
            ours = mine["values"] if "values" in mine else mine["scores"]
    return float((theirs - ours).abs().max())
