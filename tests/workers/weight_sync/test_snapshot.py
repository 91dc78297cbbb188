"""Versions in shared memory: whole or not there, whoever dies."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from podium.workers.weight_sync.snapshot import (
    SHARED_MEMORY,
    SnapshotError,
    SnapshotReader,
    SnapshotWriter,
    remove_stale,
)
from tests.workers.weight_sync.forked import processes
from tests.workers.weight_sync.snapshot_processes import NBYTES, die_half_way, fill, hold, publish, read_until

NAME = f"test-{os.getpid()}"


@pytest.fixture
def writer() -> Iterator[SnapshotWriter]:
    writer = SnapshotWriter(NAME, NBYTES)
    yield writer
    writer.close()
    assert not list(SHARED_MEMORY.glob(f"*{NAME}*"))


@pytest.fixture
def started() -> Iterator[list[BaseProcess]]:
    running: list[BaseProcess] = []
    yield running
    for process in running:
        process.kill()
        process.join(10)


def test_the_newest_version_is_read(writer: SnapshotWriter):
    reader = SnapshotReader(NAME)
    assert reader.newest() == -1
    for version in (0, 1, 5):
        publish(writer, version)
        assert reader.newest() == writer.version == version
        with reader.acquire(version, timeout_s=1) as snapshot:
            assert (snapshot.version, snapshot.notes) == (version, {"of": version})
            assert torch.equal(snapshot.memory, torch.full((NBYTES,), fill(version), dtype=torch.uint8))
    with reader.acquire(2, timeout_s=1) as snapshot:
        assert snapshot.version == 5
    with pytest.raises(ValueError, match="version 5 comes after 5"):
        publish(writer, 5)


def test_a_version_that_does_not_come_is_named(writer: SnapshotWriter):
    reader = SnapshotReader(NAME)
    with pytest.raises(SnapshotError, match=r"no version 3: it did not come within 0\.05 s; nothing is published"):
        reader.acquire(3, timeout_s=0.05).__enter__()
    publish(writer, 2)
    with pytest.raises(SnapshotError, match="the newest is 2"):
        reader.acquire(3, timeout_s=0.05).__enter__()


def test_what_a_reader_writes_stays_its_own(writer: SnapshotWriter):
    publish(writer, 1)
    with SnapshotReader(NAME).acquire(1, timeout_s=1) as snapshot:
        snapshot.memory.zero_()
    with SnapshotReader(NAME).acquire(1, timeout_s=1) as snapshot:
        assert int(snapshot.memory[0]) == fill(1)


def test_a_failure_while_writing_publishes_nothing(writer: SnapshotWriter):
    publish(writer, 1)
    with pytest.raises(ZeroDivisionError), writer.writing(2, timeout_s=1) as snapshot:
        snapshot.memory.fill_(99)
        raise ZeroDivisionError
    with SnapshotReader(NAME).acquire(0, timeout_s=1) as snapshot:
        assert snapshot.version == 1 and bool((snapshot.memory == fill(1)).all())
    publish(writer, 2)
    assert SnapshotReader(NAME).newest() == 2


def test_readers_never_see_half_a_version(writer: SnapshotWriter, started):
    results, together, last = processes.Queue(), processes.Barrier(3), 300
    for _ in range(2):
        started.append(processes.Process(target=read_until, args=(NAME, last, together, results)))
        started[-1].start()
    together.wait(60)
    for version in range(last + 1):
        publish(writer, version)
    counts = [results.get(timeout=60) for _ in started]
    assert [torn for _, torn in counts] == [None, None]
    assert min(seen for seen, _ in counts) >= 10


def test_the_writer_names_who_keeps_the_slot_and_goes_on_when_it_dies(writer: SnapshotWriter, started):
    publish(writer, 1)
    held = processes.Event()
    started.append(processes.Process(target=hold, args=(NAME, 1, held)))
    started[0].start()
    assert held.wait(60)
    publish(writer, 2)  # into the other slot
    began = time.monotonic()
    expected = rf"version 3 waited 0\.3 s for process {started[0].pid} to release"
    with pytest.raises(SnapshotError, match=expected):
        publish(writer, 3, timeout_s=0.3)
    assert time.monotonic() - began < 5
    assert SnapshotReader(NAME).newest() == 2
    started[0].kill()
    started[0].join(10)
    publish(writer, 3)
    assert SnapshotReader(NAME).newest() == 3


def test_a_writer_killed_half_way_leaves_the_old_version_and_nothing_for_long(started):
    started.append(processes.Process(target=die_half_way, args=(NAME, 7)))
    started[0].start()
    started[0].join(60)
    assert started[0].exitcode == -9
    with SnapshotReader(NAME).acquire(7, timeout_s=1) as snapshot:
        assert snapshot.version == 7 and bool((snapshot.memory == fill(7)).all())
    began = time.monotonic()
    with pytest.raises(SnapshotError, match="no version 8: its writer has died; the newest is 7"):
        SnapshotReader(NAME).acquire(8, timeout_s=60).__enter__()
    assert time.monotonic() - began < 10
    other = SnapshotWriter(f"{NAME}-other", NBYTES)
    assert not (SHARED_MEMORY / f"podium-snapshot-{NAME}").exists()
    assert other.name not in remove_stale()  # it lives
    other.close()


def test_a_name_has_one_owner(writer: SnapshotWriter):
    with pytest.raises(SnapshotError, match="a living process owns it"):
        SnapshotWriter(NAME, NBYTES)


def test_a_reader_follows_a_new_owner(writer: SnapshotWriter):
    reader = SnapshotReader(NAME)
    publish(writer, 1)
    with reader.acquire(1, timeout_s=1):
        pass
    writer.close()
    assert reader.newest() == -1
    second = SnapshotWriter(NAME, NBYTES)
    publish(second, 2)
    with reader.acquire(1, timeout_s=1) as snapshot:
        assert snapshot.version == 2 and int(snapshot.memory[-1]) == fill(2)
    second.close()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_a_full_shared_memory_is_named_and_leaves_the_old_version(tmp_path: Path):
    """On a tmpfs of its own, which has room for one version."""
    script = Path(__file__).with_name("snapshot_processes.py")
    mount = f"mount -t tmpfs -o size=7m none {tmp_path} && head -c 2M /dev/zero > {tmp_path}/ballast"
    inside = f"{mount} && {sys.executable} {script} {tmp_path}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("no user namespaces here")
    error, holds, then = done.stdout.splitlines()
    assert "snapshot full: no room for version 2: it takes 3.0 MB" in error and "No space left" in error, done.stderr
    assert (holds, then) == ("holds 1 [1]", "then 2")
