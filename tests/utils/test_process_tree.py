"""Ending processes that do not want to end together."""

import os
import subprocess
import sys
import time
import uuid

import pytest

from podium.utils.process_tree import kill_tree, start_ticks, subreaper

MARK = uuid.uuid4().hex
ROOT = """
import os, subprocess, sys, time
from podium.utils.process_tree import become_subreaper
become_subreaper()
sleep = [sys.executable, "-c", f"import time; time.sleep(555)  # {sys.argv[1]}"]
subprocess.Popen(sleep)  # a child in the group
subprocess.Popen(sleep, start_new_session=True)  # a child out of it
if os.fork() == 0:  # a daemon: out of the group, and its parent is gone
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execv(sleep[0], sleep)
os.wait()
print("ready", flush=True)
time.sleep(555)
"""


def sleepers():
    listing = subprocess.run(["ps", "-ewwo", "stat=,args="], capture_output=True, text=True).stdout.splitlines()
    return sum(f"# {MARK}" in line and not line.startswith("Z") for line in listing)


def wait_for(condition):
    until = time.monotonic() + 30
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    assert condition()


@pytest.fixture
def root():
    command = [sys.executable, "-c", ROOT, MARK]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield process
    process.wait()
    process.stdout.close()


def test_all_that_is_below_a_subreaper_ends(root):
    wait_for(lambda: sleepers() == 3)
    kill_tree(root.pid)
    assert root.wait(10) == -9
    wait_for(lambda: sleepers() == 0)


def test_a_process_is_named_for_good_by_its_start():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(process.pid)
    assert ticks is not None and ticks == start_ticks(process.pid)
    process.communicate()
    assert start_ticks(process.pid) is None
    kill_tree(process.pid)  # nothing is there, and nothing happens


def parent_of_an_orphan() -> int:
    """Starts a process that starts one and ends; the parent that the second then has."""
    orphan = "import os, time\nwhile os.getppid() == {}: time.sleep(0.01)\nprint(os.getppid())"
    starter = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}.format(os.getpid())])"
    return int(subprocess.run([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True, timeout=30).stdout)


def test_orphans_come_to_a_subreaper_while_it_is_one():
    with subreaper():
        assert parent_of_an_orphan() == os.getpid()
    assert parent_of_an_orphan() != os.getpid()
