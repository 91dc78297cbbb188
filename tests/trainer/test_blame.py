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
class Actor:
    def update_actor(self):
        print("ready", flush=True)
        self.waits_for_the_others()
    def waits_for_the_others(self):
        time.sleep(60)
host = RoleHost(ProcessContext(rank=int(sys.argv[1])))
host.construct({"actor": Actor, "critic": Actor})
host.call("actor", "update_actor", (), {})
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
    assert all(part.startswith(f"actor+critic rank {rank} (process ") for rank, part in enumerate(parts))
    assert "S (sleeping), in actor.update_actor for " in parts[0] and "waits_for_the_others" in parts[0]
    assert "T (stopped), in actor.update_actor" in parts[1] and "did not answer" in parts[1]
    assert "ended" in parts[2]
