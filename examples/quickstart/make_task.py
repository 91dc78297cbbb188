"""Make the quickstart's task: sort six digits, `291417=` -> `112479`.

Writes, all from one seed:

    OUT/train.parquet, OUT/val.parquet          prompts for PPO, in verl's columns
    OUT/sft_train.parquet, OUT/sft_val.parquet  prompt and response, mixed for training, right for validation
    OUT/model/                                  a fresh 0.53M-parameter Llama and a character tokenizer

Three of eight supervised answers are right, the others wrong (the digits copied, or sorted downwards), so that a model
fitted to them sorts now and then: PPO has something to select from, and something to gain.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

DATA_SOURCE = "podium/sort6"
DIGITS = 6
RIGHT_SHARE = 3 / 8
SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>"]
# Exactly 64 tokens with the special ones: every id that the model can emit decodes to something.
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz=+-*/%^<>()[]{}.,:;?!_ #|"


def right_answer(prompt: str) -> str:
    """The digits of `prompt` ("291417=") in ascending order ("112479")."""
    return "".join(sorted(prompt[:DIGITS]))


def wrong_answer(prompt: str, rng: random.Random) -> str:
    """The digits copied or in descending order, whichever of the two is wrong; either when both are."""
    digits = prompt[:DIGITS]
    right = right_answer(prompt)
    return rng.choice([answer for answer in (digits, right[::-1]) if answer != right])


def draw_prompts(count: int, rng: random.Random) -> list[str]:
    """`count` different prompts in random order. Six equal digits are left out: they have no wrong answer."""
    numbers = [f"{number:0{DIGITS}d}" for number in rng.sample(range(10**DIGITS), count + 10)]
    return [number + "=" for number in numbers if len(set(number)) > 1][:count]


def rl_rows(prompts: list[str], split: str) -> list[dict[str, Any]]:
    """Rows in verl's columns; `ground_truth` is what the reward function compares with."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": prompt,
            "ability": "sort",
            "reward_model": {"style": "rule", "ground_truth": right_answer(prompt)},
            "extra_info": {"index": index, "split": split},
        }
        for index, prompt in enumerate(prompts)
    ]


def sft_rows(prompts: list[str], rng: random.Random, right_share: float) -> list[dict[str, str]]:
    """That share of the rows (0 to 1) with the right answer, the others with a wrong one, in random order."""
    is_right = [index < round(right_share * len(prompts)) for index in range(len(prompts))]
    rng.shuffle(is_right)
    return [
        {"prompt": prompt, "response": right_answer(prompt) if right else wrong_answer(prompt, rng)}
        for prompt, right in zip(prompts, is_right, strict=True)
    ]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, none added at either end, padding on the left."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama with random weights, the same for the same seed; the global random state is left as it was."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def make_task(
    out: Path, seed: int, train_size: int, val_size: int, sft_size: int, sft_val_size: int
) -> dict[str, Path]:
    """Write the whole task under `out` and return the paths, by name. Sizes are in rows; no prompt occurs twice."""
    rng = random.Random(seed)
    sizes = [train_size, val_size, sft_size, sft_val_size]
    prompts = draw_prompts(sum(sizes), rng)
    assert len(set(prompts)) == sum(sizes), "the four files share a prompt"
    train, val, sft, sft_val = (prompts[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes)))

    out.mkdir(parents=True, exist_ok=True)
    names = ("train", "val", "sft_train", "sft_val")
    paths = {name: out / f"{name}.parquet" for name in names} | {"model": out / "model"}
    write_parquet(rl_rows(train, "train"), paths["train"])
    write_parquet(rl_rows(val, "val"), paths["val"])
    write_parquet(sft_rows(sft, rng, RIGHT_SHARE), paths["sft_train"])
    write_parquet(sft_rows(sft_val, rng, right_share=1.0), paths["sft_val"])
    tokenizer = build_tokenizer()
    logging.disable_progress_bar()
    tokenizer.save_pretrained(paths["model"])
    build_model(tokenizer, seed).save_pretrained(paths["model"])
    return paths


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to; made if need be")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-size", type=int, default=16384, help="rows of train.parquet")
    parser.add_argument("--val-size", type=int, default=512, help="rows of val.parquet")
    parser.add_argument("--sft-size", type=int, default=61440, help="rows of sft_train.parquet")
    parser.add_argument("--sft-val-size", type=int, default=512, help="rows of sft_val.parquet")
    args = parser.parse_args(argv)
    sizes = [args.train_size, args.val_size, args.sft_size, args.sft_val_size]
    if min(sizes) < 1 or sum(sizes) > 10**DIGITS - 10:
        print(f"error: each size must be at least 1, and all together at most {10**DIGITS - 10}", file=sys.stderr)
        return 2
    for name, path in make_task(args.out, args.seed, *sizes).items():
        print(f"{name:<10} {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
