"""What a driver reads of a scoring process at any moment was written as it is."""

import os
import signal
import time

from podium.workers.reward.channel import NOTHING, Progress


def test_no_half_written_page_is_ever_read():
    """A time of 0 would be that of a process that has been late since the machine was started."""
    page = Progress()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        while True:
            page.set(300)
            page.set(NOTHING)
    try:
        last, until = began - 1, began + 2
        while time.monotonic() < until:
            for _ in range(1000):
                item, since = page.get()
                assert item in (300, NOTHING), item
                assert since >= last, "it went back"
                last = since
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        page.close()
    assert last > began
