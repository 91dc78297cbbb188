"""A campaign of seeded faults against small runs: what survives, what is lost, and how soon it is noticed.

    python benchmarks/faults.py [--seed 0] [--share 1.0] [--only TEXT] [--out faults.md]

Every fault is real: processes are killed or stopped at random times, files are truncated, bits are flipped, a small
disk is filled (which needs the right to mount a tmpfs; without it those are left out, and that is said). A fault is
survived if the run, started again where it ended, comes to the same metrics and the same weights, bit for bit, as one
that nobody touched, or if it stops with the message that it should. ``redone`` counts steps computed twice; ``lost``
checkpoints that a fault took with it (a damaged one itself aside); ``left`` processes that outlived the run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from podium.trainer.blame import STACKS  # noqa: E402
from podium.trainer.config.supervised import SupervisedTrainerConfig  # noqa: E402
from podium.trainer.resume import find_resume  # noqa: E402
from podium.utils.checkpoint import marked  # noqa: E402
from podium.utils.errors import UserError  # noqa: E402
from tests.e2e.commands import PPO, Preloaded, Result  # noqa: E402
from tests.e2e.killed import PLACES  # noqa: E402
from tests.e2e.test_resume import computed, weights  # noqa: E402
from tests.e2e.test_rollout_death import VERSIONS  # noqa: E402
from tests.small_task import SmallTask, make_small_task  # noqa: E402

STEPS = 6
ROLLOUT = "actor_rollout_ref__rollout__"
SETUPS: dict[str, dict[str, object]] = {
    "one": {},
    "two": {"trainer__n_gpus_per_node": 2},
    "ray": {"trainer__backend": "ray", f"{ROLLOUT}placement": "device"},
    "ray two": {"trainer__backend": "ray", "trainer__n_gpus_per_node": 2},
    "vllm": {f"{ROLLOUT}name": "vllm", f"{ROLLOUT}placement": "device"},
    "ray vllm": {"trainer__backend": "ray", f"{ROLLOUT}name": "vllm", f"{ROLLOUT}placement": "device"},
}
"""Keys of each kind of run."""
KILLED, FAILING = (ROOT / "tests" / "e2e" / name for name in ("killed.py", "failing.py"))


@dataclass
class Outcome:
    """One fault."""

    survived: bool
    noticed_s: float | None = None
    lost: int = 0
    redone: int = 0
    left: int = 0
    """Processes that outlived the run by 15 s."""
    why: str = ""


@dataclass
class Campaign:
    """What the faults work on."""

    folder: Path
    rng: random.Random
    command: Preloaded
    task: SmallTask
    runs: int = 0
    straight: dict[str, Path] = field(default_factory=dict)

    def argv(self, run_dir: Path, setup: str = "one", **changes: object) -> list[str]:
        keys: dict[str, object] = {
            "trainer__total_training_steps": STEPS,
            "trainer__save_freq": 1,
            "trainer__plugins": f"[{KILLED},{FAILING}]",
            "actor_rollout_ref__actor__policy_loss__loss_mode": "failing",
        }
        return self.task.ppo(run_dir, **(keys | SETUPS[setup] | changes))

    def start(self, argv: list[str], **options: Any) -> Result:
        return self.command(PPO, argv, timeout_s=options.pop("timeout_s", 400.0), **options)

    def fresh(self) -> Path:
        self.runs += 1
        return self.folder / f"run{self.runs}"

    def untouched(self, setup: str = "one") -> Path:
        """A run that nothing happens to; made once."""
        if setup not in self.straight:
            run_dir = self.fresh()
            result = self.start(self.argv(run_dir, setup))
            assert result.code == 0, str(result)
            self.straight[setup] = run_dir
        return self.straight[setup]

    def is_same(self, run_dir: Path, setup: str = "one") -> str:
        """Empty if the run ended as the untouched one did; else what differs."""
        straight = self.untouched(setup)
        if [but_version(row) for row in computed(run_dir)] != [but_version(row) for row in computed(straight)]:
            return "metrics differ"
        return "" if weights(run_dir) == weights(straight) else "weights differ"

    def finish(self, run_dir: Path, outcomes: list[Outcome], **changes: object) -> list[Outcome]:
        """Runs to the end; where that is not the end of the untouched run, none of the faults before was survived."""
        result = self.start(self.argv(run_dir, **changes))
        why = f"exit code {result.code}: {result.err[-300:]}" if result.code != 0 else self.is_same(run_dir)
        for outcome in outcomes:
            outcome.survived, outcome.why = outcome.survived and not why, outcome.why or why
        return outcomes


def but_version(row: dict[str, Any]) -> dict[str, Any]:
    """A step without the number of its weights: a rollout that is fed again gets one more."""
    return {name: value for name, value in row.items() if name not in VERSIONS}


def interrupted(campaign: Campaign, count: int, number: int) -> Iterator[Outcome]:
    """The driver gets a signal at random times, several times a run."""
    began = time.perf_counter()
    campaign.untouched()
    longest = time.perf_counter() - began if count else 0.0
    while count > 0:
        run_dir, outcomes = campaign.fresh(), []
        for _ in range(min(count, 6)):
            before = marked(run_dir) or 0
            at = campaign.rng.uniform(0.3, max(2.0, min(longest, 8.0)))
            result = campaign.start(campaign.argv(run_dir), signal_number=number, signal_at_s=at)
            if result.code == 0:  # done before its time
                break
            outcomes.append(went_on(result, before, run_dir, (-number, 128 + number)))
        count -= len(outcomes)
        yield from campaign.finish(run_dir, outcomes)


def went_on(result: Result, before: int, run_dir: Path, codes: tuple[int, ...]) -> Outcome:
    after = marked(run_dir) or 0
    written = max((row["step"] for row in computed(run_dir)), default=0) if (run_dir / "metrics.jsonl").exists() else 0
    expected = result.code in codes
    return Outcome(
        expected and not result.left,
        lost=max(0, before - after),
        redone=max(0, written - after),
        left=len(result.left),
        why="" if expected else f"exit code {result.code}: {result.err[-300:]}",
    )


def in_the_save(campaign: Campaign, count: int) -> Iterator[Outcome]:
    """The driver is killed at a place of the loop or of the save, as a plug-in says."""
    while count > 0:
        run_dir, outcomes = campaign.fresh(), []
        for step in sorted(campaign.rng.sample(range(1, STEPS + 1), min(count, 3))):
            before = marked(run_dir) or 0
            env = {"PODIUM_TEST_KILL": f"{campaign.rng.choice(PLACES)}:{step}"}
            result = campaign.start(campaign.argv(run_dir), env=env)
            outcomes.append(went_on(result, before, run_dir, (-signal.SIGKILL,)))
        count -= len(outcomes)
        yield from campaign.finish(run_dir, outcomes)


def worker_lost(campaign: Campaign, count: int, number: int, setup: str, who: str) -> Iterator[Outcome]:
    """A worker is killed or stopped at a random time after the first step; it, or all of them, are started anew.

    Args:
        who: a role of its process, and its rank.
    """
    for _ in range(count):
        run_dir, noticed = campaign.fresh(), [0.0]
        changes = {"trainer__max_restarts": 2, "trainer__rpc_timeout_s": 60, f"{ROLLOUT}weight_sync__timeout_s": 60}
        campaign.untouched(setup)
        hit = threading.Thread(target=_hit, args=(campaign, run_dir, number, who, noticed), daemon=True)
        hit.start()
        result = campaign.start(campaign.argv(run_dir, setup, **changes), timeout_s=600)
        hit.join(5.0)
        why = f"exit code {result.code}: {result.err[-300:]}" if result.code != 0 else campaign.is_same(run_dir, setup)
        why = why or ("" if noticed[0] else "nothing was hit")
        yield Outcome(not why and not result.left, noticed[0] or None, left=len(result.left), why=why)


def _hit(campaign: Campaign, run_dir: Path, number: int, who: str, noticed: list[float]) -> None:
    lines = run_dir / "metrics.jsonl"
    while not lines.exists() or lines.read_text().count("\n") < 2:  # the first is of the validation before training
        time.sleep(0.05)
    time.sleep(campaign.rng.uniform(0.0, 2.0))
    role, rank = who.split(" ", 1)
    doing = {path: path.read_text() for path in (run_dir / STACKS).glob("*.doing")}
    [pid] = [int(p.stem.rsplit("_", 1)[1]) for p, text in doing.items() if role in text and f" {rank}\t" in text]
    with contextlib.suppress(ProcessLookupError):  # the run was done before
        os.kill(pid, number)
        began = time.monotonic()
        while time.monotonic() - began < 150:
            newest = max(campaign.folder.glob("*.err"), key=lambda path: path.stat().st_mtime)
            if re.search("restart 1 of|started anew", newest.read_text()):
                noticed[0] = time.monotonic() - began
                return
            time.sleep(0.05)


def damaged(campaign: Campaign, count: int, damage: Callable[[random.Random, bytes], bytes]) -> Iterator[Outcome]:
    """One file of the newest checkpoint is not as it was written: the one before is gone on from, and it is named."""
    straight = campaign.untouched()
    for i in range(count):
        run_dir = campaign.fresh()
        shutil.copytree(straight, run_dir)
        file = campaign.rng.choice(sorted(p for p in (run_dir / f"global_step_{STEPS}").rglob("*") if p.is_file()))
        file.write_bytes(damage(campaign.rng, file.read_bytes()))
        began, why = time.perf_counter(), ""
        try:
            resume = find_resume(SupervisedTrainerConfig(default_local_dir=str(run_dir)))
            step = resume.step if resume is not None else 0
        except UserError as error:
            step, why = 0, str(error)
        outcome = Outcome(step == STEPS - 1, time.perf_counter() - began, redone=STEPS - step, why=why)
        # One in ten goes all the way: the same bytes in the end.
        yield from campaign.finish(run_dir, [outcome]) if i % 10 == 0 else [outcome]
        shutil.rmtree(run_dir)


def truncated(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(max(1, len(content)))]


def flipped(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def disk_full(campaign: Campaign, count: int) -> Iterator[Outcome]:
    """The run directory is on a disk that cannot hold all checkpoints; then the disk grows and the run goes on."""
    size = sum(p.stat().st_size for p in (campaign.untouched() / "global_step_1").rglob("*") if p.is_file())
    for _ in range(count):
        disk = campaign.fresh()
        disk.mkdir()
        room = int(size * campaign.rng.uniform(1.2, 5.5))
        mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            print("disk full: no right to mount a tmpfs; left out", file=sys.stderr)
            return
        try:
            run_dir = disk / "run"
            result = campaign.start(campaign.argv(run_dir))
            before = marked(run_dir) or 0
            said = "was not saved" in result.err or "No space left" in result.err
            subprocess.run(["mount", "-o", f"remount,size={size * 40}", str(disk)], check=True)
            outcome = Outcome(
                said and result.code == 1 and not result.left, left=len(result.left), redone=STEPS - before
            )
            outcome.why = "" if outcome.survived else f"exit code {result.code}: {result.err[-300:]}"
            yield from campaign.finish(run_dir, [outcome])
        finally:
            subprocess.run(["umount", str(disk)], check=False)


def not_finite(campaign: Campaign, count: int) -> Iterator[Outcome]:
    """The loss of one update is NaN: it is skipped, its batch is kept, and the run ends well."""
    for _ in range(count):
        run_dir, step = campaign.fresh(), campaign.rng.randrange(1, STEPS + 1)
        result = campaign.start(campaign.argv(run_dir), env={"PODIUM_TEST_FAULT": f"nan:{step}"})
        rows = computed(run_dir)
        counted = [row["step"] for row in rows if row.get("actor/skipped_steps")] == [step]
        kept = (run_dir / "bad_steps" / f"step_{step}_actor.safetensors").is_file()
        yield Outcome(result.code == 0 and counted and kept, left=len(result.left), why=result.err[-300:])


def weights_not_finite(campaign: Campaign, count: int) -> Iterator[Outcome]:
    """Weights turn NaN in the middle of an update: the run ends and says so; no checkpoint has them, and it goes on."""
    for _ in range(count):
        run_dir, step = campaign.fresh(), campaign.rng.randrange(1, STEPS + 1)
        fault = {"PODIUM_TEST_FAULT": f"poison:{step}", "PODIUM_TEST_MARKER": str(run_dir) + ".poisoned"}
        result = campaign.start(campaign.argv(run_dir), env=fault)
        before = marked(run_dir) or 0
        said = result.code in (1, 2) and "are not finite" in result.err
        rows = computed(run_dir) if (run_dir / "metrics.jsonl").exists() else []
        redone = max((row["step"] for row in rows), default=0) - before
        outcome = Outcome(said and not result.left, lost=step - 1 - before, redone=redone, left=len(result.left))
        outcome.why = "" if outcome.survived else f"exit code {result.code}: {result.err[-300:]}"
        yield from campaign.finish(run_dir, [outcome])


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if sum(map(ord, solution_str)) % {divisor} == 0:
        {what}
    return min(6, sum(c.isdigit() for c in solution_str)) / 6
"""


def reward_faults(campaign: Campaign, count: int) -> Iterator[Outcome]:
    """The reward function raises on some samples: one line that names the sample, exit code 2, nothing left."""
    for i in range(count):
        path = campaign.folder / f"reward{i}.py"
        what = campaign.rng.choice(["raise ValueError('no')", "return None", "return float('nan')", "return 'text'"])
        path.write_text(REWARD.format(divisor=campaign.rng.randrange(2, 9), what=what))
        changes = {"custom_reward_function__path": path, "reward_model__max_failure_rate": 0}
        result = campaign.start(campaign.argv(campaign.fresh(), **changes))
        said = result.code == 2 and len(result.error_lines) == 1 and "reward" in result.err
        yield Outcome(
            said and not result.left, left=len(result.left), why=f"exit code {result.code}: {result.err[-300:]}"
        )


FAULTS: list[tuple[str, int, Callable[[Campaign, int], Iterator[Outcome]]]] = [
    ("driver killed (SIGKILL) at a random time", 12, lambda c, n: interrupted(c, n, signal.SIGKILL)),
    ("driver asked to stop (SIGTERM) at a random time", 6, lambda c, n: interrupted(c, n, signal.SIGTERM)),
    ("driver killed at a place of a step or a save", 6, in_the_save),
    ("checkpoint file truncated", 35, lambda c, n: damaged(c, n, truncated)),
    ("checkpoint file with a flipped bit", 35, lambda c, n: damaged(c, n, flipped)),
    ("disk full", 3, disk_full),
    ("loss of an update NaN", 3, not_finite),
    ("weights NaN", 3, weights_not_finite),
    ("reward function fails on samples", 3, reward_faults),
    *(
        (f"{setup}: {who} {what}", count, partial(worker_lost, number=number, setup=setup, who=who))
        for setup, who, what, number, count in (
            ("two", "actor rank 1", "killed", signal.SIGKILL, 3),
            ("two", "actor rank 1", "stopped, deadline 60 s", signal.SIGSTOP, 1),
            ("ray", "actor rank 0", "killed", signal.SIGKILL, 2),
            ("ray", "rollout rank 0", "killed", signal.SIGKILL, 2),
            ("ray", "rollout rank 0", "stopped, deadline 60 s", signal.SIGSTOP, 1),
            ("ray two", "actor rank 1", "killed", signal.SIGKILL, 1),
            ("ray two", "actor rank 1", "stopped, deadline 60 s", signal.SIGSTOP, 1),
            ("vllm", "rollout rank 0", "killed", signal.SIGKILL, 2),
            ("vllm", "rollout rank 0", "stopped, deadline 60 s", signal.SIGSTOP, 1),
            ("ray vllm", "actor rank 0", "killed", signal.SIGKILL, 1),
            ("ray vllm", "rollout rank 0", "killed", signal.SIGKILL, 2),
        )
    ),
]


def row(name: str, outcomes: list[Outcome]) -> str:
    times = [outcome.noticed_s for outcome in outcomes if outcome.noticed_s is not None]
    noticed = (
        f"{statistics.median(times):.2g} s (at most {max(times):.2g})" if times else "at once, or at the next start"
    )
    counts = (sum(getattr(outcome, name) for outcome in outcomes) for name in ("survived", "lost", "redone", "left"))
    return f"| {name} | {len(outcomes)} | " + " | ".join(map(str, counts)) + f" | {noticed} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of each kind of fault")
    parser.add_argument("--only", default="", help="kinds of fault whose name has this text")
    parser.add_argument("--out", type=Path, help="file for the table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        campaign = Campaign(folder, random.Random(args.seed), Preloaded(folder), make_small_task(folder / "task"))
        table = ["| fault | injected | survived | lost | redone | left | noticed |", "|---|---|---|---|---|---|---|"]
        whole: list[Outcome] = []
        try:
            for kind, count, inject in FAULTS:
                if args.only not in kind:
                    continue
                outcomes = []
                for outcome in inject(campaign, max(1, round(count * args.share))):
                    outcomes.append(outcome)
                    if not outcome.survived:
                        print(f"not survived: {kind}: {outcome.why}", file=sys.stderr, flush=True)
                table.append(row(kind, outcomes))
                whole += outcomes
                print(table[-1], flush=True)
        finally:
            campaign.command.close()
        table.append(row("**all**", whole).rsplit("|", 2)[0] + "| |")  # they are noticed in different ways
    print("\n".join(table))
    if args.out is not None:
        args.out.write_text("\n".join(table) + "\n")
    raise SystemExit(0 if all(outcome.survived for outcome in whole) else 1)


if __name__ == "__main__":
    main()
