"""Where the numbers of a run go: metrics.jsonl always; console, tensorboard and wandb by choice."""

import difflib
import importlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from podium.utils.console import ConsoleLogger
from podium.utils.errors import UserError
from podium.utils.redact import redact


class Logger(Protocol):
    """One destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def check_loggers(loggers: Sequence[str]) -> None:
    """Refuses loggers that `Tracking` would refuse; for callers that start other things first.

    Raises:
        UserError: an unknown logger (the nearest is named), or one that is not installed (the extra is named).
    """
    for name in loggers:
        if name not in _LOGGERS:
            near = difflib.get_close_matches(name, _LOGGERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(_LOGGERS)}"
            raise UserError(f"trainer.logger: there is no '{name}'; {hint}")
        try:
            importlib.import_module(_NEEDS.get(name, "rich"))
        except ImportError as error:
            raise UserError(
                f"trainer.logger: {name} is not installed; pip install 'podium[{name}]', or leave it out"
            ) from error


def make_run_dir(run_dir: str | Path) -> Path:
    """Makes the run directory where it is not there yet; for callers that start other things first.

    Raises:
        UserError: it cannot be made.
    """
    run_dir = Path(run_dir).expanduser()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"trainer.default_local_dir={run_dir}: {error.strerror}") from error
    return run_dir


class Tracking:
    """Writes metrics and validation samples of one run to `run_dir` and to the chosen loggers.

    Files in `run_dir`: ``config.json`` (secrets left out), ``metrics.jsonl`` (one object a line, ``step`` first, the
    other keys sorted, flushed line by line; two runs that computed the same numbers differ only in keys that start with
    ``timing_s/`` or ``perf/``; JSON has no non-finite numbers, so they are the strings "NaN", "Infinity", "-Infinity"),
    and ``val_samples.jsonl``. A new run in a used directory moves the old files to ``*.previous.jsonl``; with
    `resume_step`, lines up to that step stay, and the later ones, which the resumed run computes again, go.

    Args:
        loggers: any of ``console``, ``tensorboard``, ``wandb``.
        config: the run's configuration, nested dicts; secrets are taken out before it goes anywhere.
        total_steps: steps of the whole run, for the progress display.
        resume_step: the step of the checkpoint that the run goes on from; None for a new run.

    Raises:
        UserError: what `check_loggers` refuses, or a directory that cannot be made.
    """

    def __init__(
        self,
        loggers: list[str],
        run_dir: str | Path,
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any],
        total_steps: int,
        *,
        resume_step: int | None = None,
    ):
        check_loggers(loggers)
        run_dir = make_run_dir(run_dir)
        config = redact(config)
        self._samples_file = run_dir / "val_samples.jsonl"
        self._step = resume_step or 0
        self._run_dir, self._resume_step = run_dir, resume_step
        self._records: dict[str, _JsonLines] = {}
        self._loggers: list[Logger] = []
        try:
            for name in dict.fromkeys(loggers):
                run = _Run(run_dir, project_name, experiment_name, config, total_steps, resume_step)
                self._loggers.append(_LOGGERS[name](run))
        except BaseException:
            self.close()
            raise
        # Only now: a run that does not start leaves the files of the one before it alone.
        (run_dir / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
        _start_file(self._samples_file, resume_step)
        self._loggers.insert(0, _JsonLines(run_dir / "metrics.jsonl", resume_step))
        self._console = next((logger for logger in self._loggers if isinstance(logger, ConsoleLogger)), None)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Writes one step's metrics: numbers, 0-dim tensors or arrays, or text."""
        metrics = {name: _plain(name, value) for name, value in data.items()}
        self._step = step
        for logger in self._loggers:
            logger.log(step, metrics)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Shows rows (validation samples) on the console, escaped and clipped; val_samples.jsonl gets them whole."""
        with self._samples_file.open("a", encoding="utf-8") as file:
            for row in rows:
                line = {"step": self._step, "title": title, **dict(zip(columns, row, strict=True))}
                file.write(json.dumps(line, default=_json_default) + "\n")
        if self._console is not None:
            self._console.table(title, columns, rows)

    def record(self, name: str, row: Mapping[str, Any], step: int) -> None:
        """Writes a line to ``<name>.jsonl``, for what happens at its own pace and not once a step."""
        if name not in self._records:
            self._records[name] = _JsonLines(self._run_dir / f"{name}.jsonl", self._resume_step)
        self._records[name].log(step, row)

    def close(self) -> None:
        """Flushes and ends every logger. May be called twice."""
        while self._records:
            self._records.popitem()[1].close()
        while self._loggers:
            self._loggers.pop().close()

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _plain(name: str, value: Any) -> int | float | str | bool | None:
    """A metric as a Python number, bool, text or None."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):
        raise TypeError(f"metric {name} is {type(value).__name__}; expected a number or a 0-dim tensor") from None


def _json_default(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _start_file(path: Path, resume_step: int | None) -> None:
    """Leaves in `path` the lines of steps up to `resume_step`; without one, moves the file aside."""
    if not path.exists() or path.stat().st_size == 0:
        return
    if resume_step is None:
        path.replace(path.with_suffix(".previous.jsonl"))
        return
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= resume_step]
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    beside.replace(path)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # the last line of a run that was killed while it wrote
        return math.inf


class _JsonLines:
    def __init__(self, path: Path, resume_step: int | None):
        _start_file(path, resume_step)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        line = {"step": step, **{name: as_json(metrics[name]) for name in sorted(metrics) if name != "step"}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def as_json(value: Any) -> Any:
    """A metric as ``metrics.jsonl`` has it: JSON has no non-finite numbers, so they are strings."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


@dataclass(frozen=True)
class _Run:
    """What a logger is told of the run; the fields are `Tracking`'s."""

    run_dir: Path
    project: str
    experiment: str
    config: Mapping[str, Any]
    total_steps: int
    resume_step: int | None


class _TensorBoard:
    """A resumed run goes on in the same folder; what it had written of later steps is marked as replaced."""

    def __init__(self, run: _Run):
        from torch.utils.tensorboard import SummaryWriter

        folder, resume_step, config = run.run_dir / "tensorboard", run.resume_step, run.config
        if resume_step is None and folder.exists():
            previous = folder.with_name("tensorboard.previous")
            shutil.rmtree(previous, ignore_errors=True)
            folder.rename(previous)
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=None if resume_step is None else resume_step + 1)
        # Indented text is code in markdown.
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, bool | int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A resumed run goes on as the same run, whose id is kept in ``wandb_run_id.txt``."""

    def __init__(self, run: _Run):
        import wandb

        run_dir, kept = run.run_dir, run.run_dir / "wandb_run_id.txt"
        if run.resume_step is None or not kept.exists():
            kept.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        mode = None  # WANDB_MODE decides
        if not os.environ.get("WANDB_MODE") and not wandb.login(prompt=False, verify=False):
            mode = "offline"
            print(f"wandb: no API key, so the run is recorded offline in {run_dir / 'wandb'}; `wandb sync` uploads it")
        try:
            self._run = wandb.init(
                id=kept.read_text(encoding="utf-8").strip(),
                resume="allow",
                project=run.project,
                name=run.experiment,
                dir=str(run_dir),
                config=dict(run.config),
                mode=mode,  # type: ignore[arg-type]
                settings=wandb.Settings(silent=mode == "offline"),
            )
        except wandb.Error as error:
            raise UserError(
                f"trainer.logger: wandb does not start ({error}); WANDB_MODE=offline needs no server"
            ) from error

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step >= self._run.step:  # the server keeps what it has of a step, and a resumed run computes the same again
            self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


_LOGGERS: dict[str, Callable[[_Run], Logger]] = {
    "console": lambda run: ConsoleLogger(run.total_steps),
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
}
_NEEDS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
