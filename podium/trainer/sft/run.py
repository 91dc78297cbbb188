"""What every supervised command does around its loop: checks, arithmetic, workers, tracking."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from podium.protocol import ClassWithInitArgs
from podium.trainer.blame import STACKS, blaming
from podium.trainer.launch import resolve_device, worker_groups
from podium.trainer.layout import data_parallel_size, engine_name, offload_line
from podium.trainer.out_of_memory import naming_keys
from podium.trainer.preemption import Preemption
from podium.trainer.resume import resume_run
from podium.trainer.run_files import run_files
from podium.trainer.sft.loop import SupervisedTrainer
from podium.utils.errors import UserError
from podium.utils.redact import redact
from podium.utils.run_lock import only_run
from podium.utils.tracking import check_loggers, make_run_dir


@dataclass(frozen=True)
class SupervisedPlan:
    """The arithmetic of a run."""

    ranks: int
    rows: int
    """Of the data set, of one data-parallel rank, in one optimizer step."""
    micro: int
    """Of the data set, in one forward and backward on one rank."""
    total_steps: int


def make_supervised_plan(config: Any, train_rows: int) -> SupervisedPlan:
    """Checks batch sizes against the data and the ranks.

    Raises:
        UserError: something does not divide, or there is too little data.
    """
    data, trainer = config.data, config.trainer
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    shards = data_parallel_size("", config.strategy, config.megatron, ranks)
    if data.train_batch_size % shards:
        raise UserError(
            f"data.train_batch_size={data.train_batch_size} does not divide over {shards} data-parallel ranks: "
            f"{data.train_batch_size / shards:.2f}"
        )
    if train_rows < data.train_batch_size:
        raise UserError(f"data.train_batch_size={data.train_batch_size}, but data.train_files has {train_rows} rows")
    rows = data.train_batch_size // shards
    steps = trainer.total_training_steps or train_rows // data.train_batch_size * trainer.total_epochs
    return SupervisedPlan(ranks, rows, data.micro_batch_size_per_gpu or rows, steps)


def run_supervised(
    config: Any,
    plan: SupervisedPlan,
    name: str,
    role: ClassWithInitArgs,
    trainer_class: type[SupervisedTrainer],
    train_set: Any,
    val_set: Any | None,
    tokenizer: Any,
) -> dict[str, float]:
    """Starts the role and trains it. Returns the last validation's metrics; none where there is nothing to do."""
    trainer = config.trainer
    check_loggers(trainer.logger)
    device = resolve_device(trainer.device)
    run_dir = make_run_dir(trainer.default_local_dir).resolve()
    with only_run(run_dir):
        plain = redact(dataclasses.asdict(config))
        resume = resume_run(trainer, plain, train_set.fingerprint(), plan.total_steps)
        if resume is not None and resume.step >= plan.total_steps:
            return {}
        _say(config, plan, name, device, train_set, val_set)
        preemption = Preemption(trainer.preempt_grace_s)
        with (
            worker_groups(trainer, device, {name: role}, name, stacks=run_dir / STACKS) as groups,
            preemption(),
            blaming(run_dir),
            naming_keys({name: "data.micro_batch_size_per_gpu"}, _length_key(config.data)),
        ):
            groups[name].init_model()
            with run_files(trainer, run_dir, plain, plan.total_steps, resume, groups, preemption) as (tracking, saved):
                loop = trainer_class(
                    config, groups[name], train_set, val_set, tokenizer, tracking, plan.total_steps, saved, preemption
                )
                if resume is not None:
                    loop.restore(resume)
                return loop.fit()


def _say(config: Any, plan: SupervisedPlan, name: str, device: str, train_set: Any, val_set: Any | None) -> None:
    """What the run is about to do, as lines for the console."""
    print(f"data  train: {train_set.report}" + (f"; validation: {val_set.report}" if val_set is not None else ""))
    engine = engine_name(config.strategy, config.megatron, config.model.lora_rank)
    print(
        f"plan  {plan.ranks} rank(s), engine {engine}, {plan.total_steps} steps of {config.data.train_batch_size} "
        f"rows, micro-batch {plan.micro}",
        flush=True,
    )
    if line := offload_line(name, config.strategy, config, device):
        print(f"plan  {line}", flush=True)


def _length_key(data: Any) -> str:
    """The key of the tokens of a row."""
    return "data.max_length" if getattr(data, "messages_key", None) else "data.max_response_length"
