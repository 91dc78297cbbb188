"""No process outlives the driver, however the driver ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Run as a script: classes of a script's __main__ must work, and the script must not run again in the workers.
DRIVER = """
import os, subprocess, sys, time
from podium.protocol import *

print("driver starts", flush=True)

class Parent(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def child(self):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        return os.getpid(), child.pid

    @register(Dispatch.ONE_TO_ALL)
    def hang(self):
        print("hanging", flush=True)
        time.sleep(300)

options = {"num_cpus": 4} if sys.argv[1] == "ray" else {}
backend = make_backend(sys.argv[1], **options)
group = backend.start_group(ResourcePool([2], cpus_per_rank=1), ClassWithInitArgs(Parent), env={"OMP_NUM_THREADS": "1"})
print("pids", *[pid for pair in group.child() for pid in pair], flush=True)
if sys.argv[2] == "shutdown":
    backend.shutdown()
    backend.shutdown()
    print("closed", flush=True)
elif sys.argv[2] != "fall off":
    group.hang()
"""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _descendants(pid: int) -> list[int]:
    out = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                out += [int(stat.parent.name), *_descendants(int(stat.parent.name))]
        except OSError:
            continue
    return out


SLOW = [
    ("ray", "SIGINT"),
    ("ray", "shutdown"),
    ("ray", "fall off"),
    ("ray", "SIGTERM"),
    ("local", "SIGTERM"),
    ("local", "fall off"),
]


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        *[("local", "shutdown"), ("local", "SIGINT"), ("local", "SIGKILL"), ("ray", "SIGKILL")],
        *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
    ],
)
def test_no_orphans(tmp_path, kind, end):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    driver = subprocess.Popen(
        [sys.executable, str(script), kind, end], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    for line in driver.stdout:
        lines.append(line)
        if line.startswith("pids"):
            break
    else:
        pytest.fail("".join(lines))
    pids = [int(p) for p in lines[-1].split()[1:]]
    pids += _descendants(driver.pid)
    assert len(pids) >= 4 and lines[0] == "driver starts\n"
    if end.startswith("SIG"):
        for line in driver.stdout:
            if "hanging" in line:
                break
        os.kill(driver.pid, getattr(signal, end))
    rest, _ = driver.communicate(timeout=40)
    assert "driver starts" not in rest
    until = time.monotonic() + 15
    while (left := [p for p in pids if _alive(p)]) and time.monotonic() < until:
        time.sleep(0.1)
    names = [Path(f"/proc/{p}/cmdline").read_text() for p in left if _alive(p)]
    for p in left:
        os.kill(p, signal.SIGKILL)
    assert not names, names
    if end == "shutdown":
        assert "closed" in rest and driver.returncode == 0
