"""Metrics for a person: a live line on a terminal, one aligned line a step anywhere else."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

# What a line shows, in order: label, and the metrics of which the first that is there is taken.
_SHOWN = (
    ("reward", ("critic/score/mean", "critic/rewards/mean")),
    ("loss", ("train/loss",)),
    ("kl_ref", ("actor/reward_kl_penalty", "actor/kl_loss")),
    ("kl_old", ("actor/ppo_kl",)),
    ("length", ("response_length/mean",)),
    ("step_s", ("perf/time_per_step",)),
)
_PHASE = "timing_s/"
_WORTH_SHOWING_S = 0.005
_CLIP = 400
_PLAIN_WIDTH = 120


class ConsoleLogger:
    """Shows step, reward, KL, response length, and seconds by phase.

    On a terminal a progress bar and the numbers below it are redrawn in place, and only validation stays on the screen;
    elsewhere (a file, a pipe) each step is one line of aligned columns.
    """

    def __init__(self, total_steps: int, console: Console | None = None):
        self._console = console or Console()
        self._total = total_steps
        self._progress = Progress("step", BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
        self._live: Live | None = None
        self._phases: list[str] = []
        if not self._console.is_interactive and console is None:
            self._console = Console(width=_PLAIN_WIDTH)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        validation = "  ".join(f"{name} {_number(value)}" for name, value in metrics.items() if name.startswith("val/"))
        cells = [f"{label} {_number(value):>8}" for label, value in _shown(metrics)]
        if not self._console.is_interactive:
            counter = f"step {step:>{len(str(self._total))}}/{self._total}"
            times = self._times(metrics) if cells else []  # a validation before the first step is no step
            self._print("  ".join([counter, *cells, *times, *([validation] if validation else [])]).rstrip())
            return
        if validation:
            self._print(f"step {step}: {validation}")
        if cells:
            self._draw(step, "  ".join(cells), "  ".join(self._times(metrics)))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Prints rows below a title; control characters are written as escapes, long cells clipped."""
        table = Table(title=Text(_printable(title)), show_lines=False)
        for column in columns:
            table.add_column(Text(_printable(str(column))), overflow="fold")
        for row in rows:
            table.add_row(*(Text(_printable(str(cell))) for cell in row))
        self._console.print(table)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _draw(self, step: int, *lines: str) -> None:
        if self._live is None:
            self._task = self._progress.add_task("step", total=self._total)
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._progress.update(self._task, completed=step)
        self._live.update(Group(self._progress, *map(Text, lines)), refresh=True)

    def _times(self, metrics: Mapping[str, Any]) -> list[str]:
        """Seconds by phase in the order in which phases first came, so that columns stay where they are."""
        now = {name.removeprefix(_PHASE): value for name, value in metrics.items() if name.startswith(_PHASE)}
        now = {phase: seconds for phase, seconds in now.items() if phase in self._phases or seconds >= _WORTH_SHOWING_S}
        self._phases += [phase for phase in now if phase not in self._phases and phase != "step"]
        if not now:
            return []
        return [f"{phase} {_seconds(now.get(phase))}" for phase in self._phases]


def _shown(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for label, names in _SHOWN:
        present = [name for name in names if name in metrics]
        if present:
            yield label, metrics[present[0]]


def _seconds(value: float | None) -> str:
    return " " * 6 if value is None else f"{value:>6.2f}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _printable(text: str) -> str:
    clipped = text if len(text) <= _CLIP else text[:_CLIP] + "…"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in clipped)
