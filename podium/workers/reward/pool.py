"""A pool of processes that score items, each within a time limit, and are replaced when they die or must be killed."""

import dataclasses
import os
import pickle
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from podium.utils.errors import UserError
from podium.utils.redact import redact_text
from podium.workers.reward.channel import NOTHING
from podium.workers.reward.outcome import Outcome
from podium.workers.reward.process import Reaper, ScoringProcess
from podium.workers.reward.process_main import HEARTBEAT_S, HELLO, Hello, Job

_LOAD_LIMIT_S = 120.0
_DYING_S = 1.0
_LARGEST_CHUNK = 64
_CHUNK_S = 0.02
_SHOWN_OUTPUT = 2000
_UNEXPLAINED = 3
_CANCEL_S = 0.5


class Cancelled(Exception):
    """A call was given up by another thread."""


class ProcessPool:
    """Runs a job on items; what an item does to its process is that item's outcome.

    Items go out in chunks that shrink as fewer are left, so that the processes end together. A process that is late or
    dies is killed with all that it started; the item that it was at is blamed, the others go to another process.

    Args:
        job: a reward function and how to call it.
        num_processes: started as they are needed.
        memory_limit_mb: MiB of memory a process may have of its own; None is no limit.
        concurrency: items that an async function works on at the same time, over all processes.
        secrets: what the function is given, and nothing that is told of it may contain.
    """

    def __init__(
        self,
        job: Job,
        num_processes: int,
        memory_limit_mb: int | None,
        concurrency: int,
        secrets: Sequence[str] = (),
    ):
        assert num_processes >= 1 and concurrency >= 1
        self._secrets = secrets
        self._job, self._size, self._memory_limit_mb = job, num_processes, memory_limit_mb
        self._concurrency = -(-concurrency // num_processes)
        self._processes: list[ScoringProcess] = []
        self._reaper: Reaper | None = None
        self._selector = selectors.DefaultSelector()
        self._lock, self._guard = threading.Lock(), threading.Lock()
        self._busy = self._cancelled = False
        self._unexplained = 0
        self._item_s = _CHUNK_S

    def run(self, items: list[Any]) -> list[Any]:
        """What the job makes of each item, or an `Outcome` where it made nothing.

        Raises:
            UserError: the reward function cannot be loaded, or the processes die without working on anything.
        """
        with self._lock:
            self._busy = True
            try:
                return self._run(items)
            except BaseException:  # nothing of this call may come up in the next
                self.close()
                raise
            finally:
                with self._guard:
                    self._busy = self._cancelled = False

    def cancel(self) -> None:
        """Ends the call that another thread is in, if there is one, within half a second, with `Cancelled`."""
        with self._guard:
            self._cancelled = self._busy

    def close(self) -> None:
        """Ends the processes. The pool can be used again."""
        while self._processes:
            self._end(self._processes[-1])
        if self._reaper is not None:
            self._reaper.close()
            self._reaper = None

    def _run(self, items: list[Any]) -> list[Any]:
        self._items, self._results = items, dict[int, Any]()
        self._queue, self._alone = deque(range(len(items))), set[int]()
        self._printed, self._printed_bytes = bytearray(), 0
        began = time.monotonic()
        while len(self._results) < len(items):
            if self._cancelled:
                raise Cancelled("scoring was given up")
            self._start_missing()
            for process in self._processes:
                self._feed(process)
            for key, events in self._selector.select(self._seconds_to_next_deadline()):
                process, what = key.data
                if process in self._processes:
                    self._handle(process, what, events)
            for process in list(self._processes):
                self._check_deadline(process)
        self._show_output()
        if items:
            # The last process may have been killed for the last item.
            self._item_s = (time.monotonic() - began) * max(1, len(self._processes)) / len(items)
        return [self._without_secrets(self._results[number]) for number in range(len(items))]

    def _without_secrets(self, result: Any) -> Any:
        """Failures are printed, and kept in the run directory."""
        if isinstance(result, list):
            return [self._without_secrets(outcome) for outcome in result]
        if not isinstance(result, Outcome) or result.kind == "score":
            return result
        reason, traceback = (redact_text(text, self._secrets) for text in (result.reason, result.traceback))
        return dataclasses.replace(result, reason=reason, traceback=traceback)

    def _start_missing(self) -> None:
        open_items = len(self._items) - len(self._results)
        while len(self._processes) < min(self._size, open_items):
            self._reaper = self._reaper or Reaper()
            process = ScoringProcess(self._job, self._memory_limit_mb, self._reaper)
            self._processes.append(process)
            self._selector.register(process.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, (process, "channel"))
            self._selector.register(process.output, selectors.EVENT_READ, (process, "output"))
            self._selector.register(process.ended, selectors.EVENT_READ, (process, "ended"))

    def _feed(self, process: ScoringProcess) -> None:
        while self._queue and process.asynchronous is not None:
            room = self._room(process)
            if room < 1:
                return
            numbers = [self._queue.popleft() for _ in range(min(room, len(self._queue)))]
            process.send([(number, pickle.dumps(self._items[number], pickle.HIGHEST_PROTOCOL)) for number in numbers])
            process.pump_out()
            self._watch_channel(process)

    def _room(self, process: ScoringProcess) -> int:
        """How many items to send now."""
        busy = len(process.in_flight)
        if self._alone:
            alone = self._queue[0] in self._alone
            return int(not busy) if alone or not self._alone.isdisjoint(process.in_flight) else 1 - busy
        if process.asynchronous:
            return self._concurrency - busy
        if busy > 1:  # the last one of a chunk hides the time until the next is there
            return 0
        left, ready = len(self._queue), len(self._processes)
        # Items that took microseconds in the call before go out at once: messages would cost more than they do.
        at_once = min(left // ready, int(_CHUNK_S / self._item_s))
        return max(1, at_once, min(_LARGEST_CHUNK, left // (2 * ready)))

    def _handle(self, process: ScoringProcess, what: str, events: int) -> None:
        if what == "output":
            self._read_output(process)
        elif what == "ended" or (events & selectors.EVENT_READ and not self._take_answers(process)):
            self._bury(process)
        elif events & selectors.EVENT_WRITE:
            process.pump_out()
            self._watch_channel(process)

    def _watch_channel(self, process: ScoringProcess) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.has_more_to_send else 0)
        if self._selector.get_key(process.channel).events != events:
            self._selector.modify(process.channel, events, (process, "channel"))

    def _take_answers(self, process: ScoringProcess) -> bool:
        """False when the process will give no more."""
        answers = process.receive()
        for number, data in answers or []:
            result = _loads(data)
            if number == HELLO:
                assert isinstance(result, Hello)
                if result.error is not None:
                    raise UserError(result.error)
                process.asynchronous = result.asynchronous
            else:
                del process.in_flight[number]
                self._results[number] = result
                self._unexplained = 0
        return answers is not None

    def _read_output(self, process: ScoringProcess) -> bool:
        """Whether there was any."""
        data = process.read_output()
        if data is None and process.output in self._selector.get_map():
            self._selector.unregister(process.output)
        self._printed_bytes += len(data or b"")
        self._printed += (data or b"")[: _SHOWN_OUTPUT - len(self._printed)]
        return bool(data)

    def _show_output(self) -> None:
        for process in self._processes:
            while self._read_output(process):
                continue
        if self._printed:
            text = redact_text(self._printed.decode(errors="replace").rstrip("\n"), self._secrets)
            more = self._printed_bytes - len(self._printed)
            source = redact_text(str(self._job.source))
            print(f"reward function {source} printed:\n{text}" + (f"\n... and {more} bytes" if more else ""))
            sys.stdout.flush()

    def _deadline(self, process: ScoringProcess) -> float | None:
        item, since = process.at()
        if process.asynchronous is None:
            return process.began + _LOAD_LIMIT_S
        if process.asynchronous:  # late items end by themselves; only a loop that one of them blocks does not
            return since + HEARTBEAT_S + self._job.limit_s if process.in_flight else None
        return None if item == NOTHING else since + self._job.limit_s

    def _seconds_to_next_deadline(self) -> float:
        deadlines = [deadline for process in self._processes if (deadline := self._deadline(process)) is not None]
        # An item may begin, and the call be cancelled, while this waits.
        longest = min(self._job.limit_s, _CANCEL_S)
        return max(0.0, min([*deadlines, time.monotonic() + longest]) - time.monotonic())

    def _check_deadline(self, process: ScoringProcess) -> None:
        item, _ = process.at()
        deadline = self._deadline(process)
        if deadline is None or time.monotonic() < deadline:
            return
        while self._take_answers(process) and process.has_answers():
            continue
        if process.asynchronous is not None and not process.asynchronous and item not in process.in_flight:
            return
        process.dump_stacks()
        loaded = process.asynchronous is not None
        self._end(process)
        if not loaded:
            raise UserError(
                f"reward function {self._job.source} was not loaded in {_LOAD_LIMIT_S:g} s\n{process.tail()}"
            )
        reason = f"no result in {self._job.limit_s:g} s; its process was killed"
        self._blame(process, item, Outcome("timeout", reason=reason, traceback=process.tail()))

    def _bury(self, process: ScoringProcess) -> None:
        """Of a process that has died."""
        while self._take_answers(process) and process.has_answers():
            continue
        item, _ = process.at()
        how = self._end(process, _DYING_S)
        if process.asynchronous is None:
            raise UserError(f"the process that loads reward function {self._job.source} {how}: {_last_line(process)}")
        self._blame(process, item, Outcome("error", reason=f"its process {how}", traceback=process.tail()))

    def _blame(self, process: ScoringProcess, item: int, outcome: Outcome) -> None:
        """Gives `outcome` to the item that did it and all others back to the queue."""
        rest = list(process.in_flight)
        if process.asynchronous and len(rest) == 1:
            item = rest[0]
        if item in process.in_flight:
            self._results[item] = outcome
            rest.remove(item)
        elif process.asynchronous:
            self._alone.update(rest)
        else:
            self._unexplained += 1
            if self._unexplained >= _UNEXPLAINED:
                raise UserError(
                    f"processes of reward function {self._job.source} keep dying while they work on nothing "
                    f"({outcome.reason}): {_last_line(process)}"
                )
        self._queue.extendleft(reversed(rest))

    def _end(self, process: ScoringProcess, grace_s: float = 0.0) -> str:
        for watched in (process.channel, process.output, process.ended):
            if watched in self._selector.get_map():
                self._selector.unregister(watched)
        self._processes.remove(process)
        return process.end(grace_s)


def _loads(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:  # an object of a class that only the function's own file has
        reason = f"what it returned cannot be read by the driver ({type(error).__name__}: {error})"
        return Outcome("error", reason=" ".join(reason.split()))


def _last_line(process: ScoringProcess) -> str:
    lines = process.tail().strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def default_num_processes() -> int:
    """A process for each core that this process may use, at most 32."""
    return min(32, len(os.sched_getaffinity(0)))
