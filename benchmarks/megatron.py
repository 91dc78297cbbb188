"""One optimizer step of the Megatron engine on one rank, beside the FSDP engine and a bare loop over the same model.

    python benchmarks/megatron.py [--layers 4] [--hidden 256] [--rows 16] [--width 128] [--micro 4] [--rounds 5]

All three train on the same rows, in one process and in turns, so that what else the machine does falls on all alike.
The loss is the likelihood of the responses, with its entropy reported, as the engines do it for PPO.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from podium.trainer.config.shared import FSDPConfig, MegatronConfig, OptimConfig
from podium.utils.torch_functional import Denominator
from podium.workers.engine.base import Tensors
from podium.workers.engine.build import build_engine
from podium.workers.engine.spec import LogProbs, ModelSpec, Training

VOCABULARY = 8192


class Sections:
    """The engines' parts of a role's configuration."""

    fsdp_config, megatron = FSDPConfig(), MegatronConfig()


def main() -> None:
    # Python puts this folder first on its path, where this very file would be taken for the package megatron.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("hidden", 256), ("rows", 16), ("width", 128), ("micro", 4), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = ragged_rows(args.rows, args.width)
    with tempfile.TemporaryDirectory() as path:
        make_model(args.layers, args.hidden).save_pretrained(path)
        steps = {
            "bare loop": bare_loop(path, batch, args.micro),
            "FSDP engine": engine("fsdp", path, batch, args.micro),
            "Megatron engine": engine("megatron", path, batch, args.micro),
        }
        losses = {name: step() for name, step in steps.items()}  # the first step of each warms it up
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(args.rounds):
            for name, step in steps.items():
                began = time.process_time()
                step()
                seconds[name].append(time.process_time() - began)
    tokens = int(batch["attention_mask"].sum())
    print(
        f"{args.rows} rows, {tokens} tokens, micro-batch {args.micro}; "
        f"CPU seconds of a step, the best of {args.rounds}\n"
    )
    print("| | first loss | s | to the bare loop |\n|---|---|---|---|")
    for name, times in seconds.items():
        print(f"| {name} | {losses[name]:.5f} | {min(times):.2f} | {min(times) / min(seconds['bare loop']):.2f}x |")


def make_model(layers: int, hidden: int) -> torch.nn.Module:
    """A random Llama in float32."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            tie_word_embeddings=False,
            pad_token_id=None,
        )
    )


def ragged_rows(rows: int, width: int) -> Tensors:
    """Prompts and responses of half to all of `width` tokens each, padded as the trainer pads them."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(width // 2, width + 1, (2, rows, 1), generator=g)
    place = torch.arange(width)
    mask = torch.cat([place >= width - lengths[0], place < lengths[1]], dim=1)
    ids = torch.where(mask, torch.randint(2, VOCABULARY, mask.shape, generator=g), 0)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.long().cumsum(dim=1) - 1).clamp(min=0),
        "responses": ids[:, width:].clone(),
        "response_mask": mask[:, width:].clone(),
    }


def likelihood(outputs: Tensors, rows: Tensors, denominator: Denominator) -> tuple[torch.Tensor, Tensors]:
    """The engines' loss."""
    mask = rows["response_mask"]
    loss = -torch.where(mask, outputs["log_probs"], 0.0).sum() / denominator.tokens
    return loss, {"loss": loss, "entropy": torch.where(mask, outputs["entropy"], 0.0).sum() / denominator.tokens}


def engine(strategy: str, path: str, batch: Tensors, micro: int) -> Callable[[], float]:
    """A step of an engine; gives the loss."""
    built = build_engine(strategy, Sections(), ModelSpec(path, LogProbs()), Training(OptimConfig(), 1000, 1.0))
    return lambda: built.train(batch, likelihood, micro)["loss"]


def bare_loop(path: str, batch: Tensors, micro: int) -> Callable[[], float]:
    """The same step with nothing but transformers and torch."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").train()
    config = OptimConfig()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True)
    width, tokens = batch["responses"].shape[1], batch["response_mask"].sum()

    def step() -> float:
        total = 0.0
        for start in range(0, len(batch["input_ids"]), micro):
            rows = {name: value[start : start + micro] for name, value in batch.items()}
            inputs = {name: rows[name] for name in ("input_ids", "position_ids")}
            logits = model(**inputs, attention_mask=rows["attention_mask"].long(), logits_to_keep=width + 1).logits
            log_p = torch.log_softmax(logits[:, :-1], dim=-1)
            chosen = log_p.gather(-1, rows["responses"][..., None]).squeeze(-1)
            with torch.no_grad():
                (-(log_p.exp() * log_p).sum(dim=-1) * rows["response_mask"]).sum()
            loss = -(chosen * rows["response_mask"]).sum() / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


if __name__ == "__main__":
    main()
