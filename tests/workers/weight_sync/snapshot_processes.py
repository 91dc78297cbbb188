"""What the tests of the snapshot run in processes of their own."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from podium.workers.weight_sync.snapshot import SHARED_MEMORY, SnapshotReader, SnapshotWriter

NBYTES = 3_000_000


def fill(version: int) -> int:
    return version % 251


def publish(writer: SnapshotWriter, version: int, timeout_s: float = 10.0) -> None:
    with writer.writing(version, timeout_s) as snapshot:
        snapshot.memory.fill_(fill(version))
        snapshot.notes["of"] = version


def read_until(name: str, last: int, started: Any, results: Any) -> None:
    """Reads again and again; puts how often it read, and the first version of which it saw only a part."""
    reader, seen, torn, version = SnapshotReader(name), 0, None, -1
    started.wait(60)
    while version < last:
        with reader.acquire(version + 1, timeout_s=30) as snapshot:
            whole = bool((snapshot.memory == fill(snapshot.version)).all())
            torn = torn if whole and snapshot.notes == {"of": snapshot.version} else snapshot.version
            version, seen = snapshot.version, seen + 1
    results.put((seen, torn))


def hold(name: str, version: int, held: Any) -> None:
    """Never lets go."""
    with SnapshotReader(name).acquire(version, timeout_s=30):
        held.set()
        time.sleep(600)


def die_half_way(name: str, version: int) -> None:
    """Publishes a version and is killed while it writes the next."""
    writer = SnapshotWriter(name, NBYTES)
    publish(writer, version)
    with writer.writing(version + 1, timeout_s=10) as snapshot:
        snapshot.memory[: NBYTES // 2] = 255
        os.kill(os.getpid(), signal.SIGKILL)


def fill_up(root: Path) -> None:
    """On a shared memory that has room for one version only."""
    from podium.workers.weight_sync.snapshot import SnapshotError

    writer, reader = SnapshotWriter("full", NBYTES, root), SnapshotReader("full", root)
    publish(writer, 1)
    try:
        publish(writer, 2)
    except SnapshotError as error:
        print(error)
    with reader.acquire(0, timeout_s=1) as snapshot:
        print("holds", snapshot.version, torch.unique(snapshot.memory).tolist())
    (root / "ballast").unlink()
    publish(writer, 2)
    print("then", reader.newest())


if __name__ == "__main__":
    fill_up(Path(sys.argv[1]) if len(sys.argv) > 1 else SHARED_MEMORY)
