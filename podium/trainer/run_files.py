"""What a run writes to its directory while it goes on: metrics and checkpoints."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from podium.protocol import WorkerGroup
from podium.trainer.checkpoint import Checkpoints
from podium.trainer.ppo.bundles import set_aside
from podium.trainer.preemption import Preemption
from podium.trainer.resume import Resume, metrics_from
from podium.utils.tracking import Tracking


@contextmanager
def run_files(
    trainer: Any,
    run_dir: Path,
    plain: Mapping[str, Any],
    total_steps: int,
    resume: Resume | None,
    trained: Mapping[str, WorkerGroup],
    preemption: Preemption,
) -> Iterator[tuple[Tracking, Checkpoints]]:
    """Opens them where the run goes on; what was kept of steps that come again is set aside.

    Args:
        trainer: the configuration's section.
        plain: the configuration as plain values, without secrets.
        trained: roles that checkpoints hold, by name.
        preemption: is told what the run would go on from.
    """
    with (
        Tracking(
            trainer.logger,
            run_dir,
            trainer.project_name,
            trainer.experiment_name,
            plain,
            total_steps,
            resume_step=metrics_from(resume, run_dir),
        ) as tracking,
        Checkpoints(run_dir, trainer, trained, plain) as checkpoints,
    ):
        preemption.state = checkpoints.state
        set_aside(run_dir, resume.step if resume is not None else 0)
        yield tracking, checkpoints
