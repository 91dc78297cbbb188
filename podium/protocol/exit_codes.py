"""Exit codes of processes on this machine that are not children of this one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct

_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes); Linux 6.13
_PIDFD_INFO_EXIT = 1 << 3  # Linux 6.15
_SIZE, _EXIT_CODE_AT = 64, 60


class ProcessWatch:
    """Holds on to a process from before its end, so that its exit code can be asked for after it.

    On kernels older than Linux 6.15, and for a process of another machine, the code stays unknown.
    """

    def __init__(self, pid: int, start_ticks: int) -> None:
        self._fd: int | None = None
        try:
            fd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return
        if start_time(pid) == start_ticks:
            self._fd = fd
        else:  # the same number on another machine
            os.close(fd)

    def ended(self, timeout_s: float = 0.0) -> bool | None:
        """Whether it has ended (after at most ``timeout_s``); None if that cannot be known."""
        if self._fd is None:
            return None
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def exit_code(self, timeout_s: float) -> int | None:
        """Its exit code, negative for a signal, or None."""
        if self._fd is None or not self.ended(timeout_s):
            return None
        # It must be reaped by its parent before the code is there.
        for _ in range(20):
            request = bytearray(struct.pack("Q", _PIDFD_INFO_EXIT).ljust(_SIZE, b"\0"))
            try:
                fcntl.ioctl(self._fd, _PIDFD_GET_INFO, request)
            except OSError:
                return None
            if struct.unpack_from("Q", request)[0] & _PIDFD_INFO_EXIT:
                return os.waitstatus_to_exitcode(struct.unpack_from("i", request, _EXIT_CODE_AT)[0])
            select.select([], [], [], 0.05)
        return None

    def kill(self) -> None:
        """End it, unless it has ended or is on another machine."""
        if self._fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        """Let go; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot; -1 if it is not there."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return int(f.read().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return -1
