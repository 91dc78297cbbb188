"""Responses to a data set's prompts: ``python3 -m podium.trainer.main_generate key=value ...`` (``--help``)."""

from pathlib import Path
from typing import Any

from podium.trainer.cli import run_main
from podium.trainer.config import GenerateConfig, check_generate_config, parse_command_line
from podium.utils.errors import UserError


def main() -> None:
    """Reads the command line and generates."""
    config, explicit = parse_command_line(GenerateConfig, "python3 -m podium.trainer.main_generate")
    check_generate_config(config, explicit)
    generate_file(config)


def generate_file(config: GenerateConfig) -> Path:
    """Answers every prompt ``rollout.n`` times; goes on where an earlier run of the same plan stopped.

    Returns:
        The parquet file: the input's rows in their order, with ``responses`` and ``finished`` (False for a response
        that was cut at the length limit), lists of n.

    Raises:
        UserError: bad input.
    """
    from podium.models.hf import load_hf_config
    from podium.protocol import ClassWithInitArgs
    from podium.trainer.chat import chat_options, load_chat_tokenizer
    from podium.trainer.generation.parts import Parts
    from podium.trainer.launch import resolve_device, worker_groups
    from podium.trainer.out_of_memory import naming_keys
    from podium.trainer.ppo.roles import check_rollout
    from podium.utils.dataset import PromptDataset
    from podium.utils.tokenizer import stop_token_ids
    from podium.workers.rollout.worker import RolloutWorker

    data, model, rollout = config.data, config.model, config.rollout
    if not data.output_path.endswith(".parquet"):
        raise UserError(f"data.output_path={data.output_path}: give the parquet file to write (*.parquet)")
    device = resolve_device(config.trainer.device)
    hf_config = load_hf_config(model.path, "model.path", model.trust_remote_code)
    check_rollout(rollout.name, hf_config, device, "rollout.name")
    tokenizer = load_chat_tokenizer(model.path, data, model.trust_remote_code, "model.path")
    dataset = PromptDataset(
        data.path,
        tokenizer,
        prompt_key=data.prompt_key,
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        chat=chat_options(data),
        key="data.path",
    )
    print(f"data  {dataset.report}")
    output = Path(data.output_path).expanduser()
    parts = Parts(output, _plan(config, dataset, tokenizer))
    if parts.open():
        print(f"{output} is complete already: {len(dataset)} rows")
        return output
    starts = range(0, len(dataset), data.batch_size)
    todo = [start for start in starts if not parts.has(start)]
    if len(todo) < len(starts):
        print(f"goes on: {len(starts) - len(todo)} of {len(starts)} batches are there")
    if todo:
        stop = stop_token_ids(model.path, tokenizer)
        role = ClassWithInitArgs(
            RolloutWorker,
            model.path,
            rollout,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            pad_token_id=tokenizer.pad_token_id,
            stop_token_ids=stop,
            seed=config.trainer.seed,
            trust_remote_code=model.trust_remote_code,
        )
        with (
            worker_groups(config.trainer, device, {"rollout": role}, "generate") as groups,
            naming_keys({"rollout": "rollout.max_num_seqs"}, "data.max_response_length"),
        ):
            groups["rollout"].init_model()
            groups["rollout"].load_own_weights()
            for done, start in enumerate(todo, 1):
                parts.write(start, _answer(config, dataset, tokenizer, groups["rollout"], start, stop))
                print(f"batch {len(starts) - len(todo) + done}/{len(starts)}", flush=True)
    parts.finish([{**dataset.file_row(i), **answer} for i, answer in enumerate(parts.read())])
    print(f"wrote {output}: {len(dataset)} rows, {rollout.n} response(s) each")
    return output


def _plan(config: GenerateConfig, dataset: Any, tokenizer: Any) -> dict[str, Any]:
    """What the responses depend on."""
    data, rollout = config.data, config.rollout
    return {
        "data.path": [[file, Path(file).expanduser().stat().st_size] for file in dataset.files],
        "data": [data.prompt_key, data.max_prompt_length, data.max_response_length, data.truncation, data.batch_size],
        "chat template": [tokenizer.chat_template, str(data.apply_chat_template_kwargs), data.system_prompt],
        "model.path": str(Path(config.model.path).expanduser().resolve()),
        "rollout": [rollout.name, rollout.n, rollout.temperature, rollout.top_p, rollout.top_k, rollout.dtype],
        "trainer.seed": config.trainer.seed,
    }


def _answer(
    config: GenerateConfig, dataset: Any, tokenizer: Any, rollout: Any, start: int, stop: tuple[int, ...]
) -> dict[str, list[Any]]:
    """The responses to one batch of prompts, those to a prompt together."""
    from podium.trainer.ppo.source import generate, prompt_batch, response_seeds

    data, sampling, n = config.data, config.rollout, config.rollout.n
    rows = [dataset[i] for i in range(start, min(start + data.batch_size, len(dataset)))]
    prompts = prompt_batch(rows, tokenizer.pad_token_id, data.max_prompt_length, n)
    seeds = response_seeds(config.trainer.seed, start, len(prompts))
    parameters = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    batch = generate(rollout, prompts, parameters, seeds, min_version=0)
    assert batch.batch is not None
    masks = batch.batch["response_mask"].bool()
    ids = [row[mask].tolist() for row, mask in zip(batch.batch["responses"], masks, strict=True)]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    finished = [bool(tokens) and tokens[-1] in stop for tokens in ids]
    return {
        name: [values[i : i + n] for i in range(0, len(values), n)]
        for name, values in {"responses": texts, "finished": finished}.items()
    }


if __name__ == "__main__":
    run_main(main)
