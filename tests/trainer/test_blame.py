"""The report on ranks that are late: real processes, one asleep in a named function, one stopped, one gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from podium.trainer.blame import STACKS, blame

RANK = """
import sys, time
from podium.protocol.host import RoleHost
from podium.protocol.worker import ProcessContext
host = RoleHost(ProcessContext(rank=int(sys.argv[1])))
host.construct({})
print("ready", flush=True)
def waits_for_the_others():
    time.sleep(60)
waits_for_the_others()
"""


def test_each_rank_is_reported(tmp_path: Path):
    env = {**os.environ, "PODIUM_STACKS": str(tmp_path / STACKS)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank)], env=env, stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        time.sleep(0.2)
        ranks[1].send_signal(signal.SIGSTOP)
        ranks[2].kill()
        ranks[2].wait()
        report = blame(tmp_path, TimeoutError("actor.update_actor did not finish")).read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    head, *parts = report.split("== ")
    assert "actor.update_actor did not finish" in head and len(parts) == 3
    assert parts[0].startswith("rank_0_") and "waits_for_the_others" in parts[0]
    assert parts[1].startswith("rank_1_") and "T (stopped)" in parts[1] and "did not answer" in parts[1]
    assert parts[2].startswith("rank_2_") and "ended" in parts[2]
