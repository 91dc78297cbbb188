"""Runs untrusted Python, as a script: ``sandbox_main.py FOLDER TOKEN SECONDS MEMORY_MB FILE_MB``.

The kernel refuses the process, and every thread of it: sockets, further processes and programs, signals to others, and
looking into others (a seccomp filter, which needs no privilege and cannot be taken off). Limits of time, memory and
file size bound the rest. Standard library only.
"""

import ctypes
import os
import platform
import resource
import struct
import sys

REFUSED = 97
"""Exit code: this system has no seccomp filters."""
_MACHINES = {
    # architecture, and system calls by number
    "x86_64": (
        0xC000003E,
        {"clone": 56, "kill": 62, "tgkill": 234, "clone3": 435, "prlimit64": 302},
        # socket, fork, vfork, execve, execveat, ptrace, process_vm_readv, process_vm_writev, tkill, rt_sigqueueinfo,
        # rt_tgsigqueueinfo, pidfd_send_signal, io_uring_setup, unshare, setns, mount, bpf, setpriority,
        # sched_setaffinity
        (41, 57, 58, 59, 322, 101, 310, 311, 200, 129, 297, 424, 425, 272, 308, 165, 321, 141, 203),
    ),
    "aarch64": (
        0xC00000B7,
        {"clone": 220, "kill": 129, "tgkill": 131, "clone3": 435, "prlimit64": 261},
        (198, 221, 281, 117, 270, 271, 130, 138, 240, 424, 425, 97, 268, 40, 280, 140, 122),
    ),
}
_CLONE_THREAD = 0x10000
_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def _filter() -> list[tuple[int, int, int, int]]:
    """A BPF program: (code, jump if true, jump if false, constant) a line."""
    architecture, calls, denied = _MACHINES[platform.machine()]
    deny, allow = (_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)
    me = os.getpid()
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, 0x40000000),  # numbers of another calling convention
        deny,
    ]
    for number in denied:
        program += [(_EQUAL, 0, 1, number), deny]
    # The C library falls back to clone, whose flags can be looked at.
    program += [(_EQUAL, 0, 1, calls["clone3"]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    program += [(_EQUAL, 0, 4, calls["clone"]), (_LOAD, 0, 0, _ARGUMENT), (_ANY_BIT, 1, 0, _CLONE_THREAD), deny, allow]
    for name in ("kill", "tgkill", "prlimit64"):  # to itself only
        program += [
            (_EQUAL, 0, 5, calls[name]),
            (_LOAD, 0, 0, _ARGUMENT),
            (_EQUAL, 2, 0, me),
            (_EQUAL, 1, 0, 0),
            deny,
            allow,
        ]
    return [*program, allow]


def _restrict() -> None:
    if platform.machine() not in _MACHINES:
        sys.exit(REFUSED)
    lines = [struct.pack("HBBI", *line) for line in _filter()]
    code = ctypes.create_string_buffer(b"".join(lines))
    program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, program, 0, 0):
        sys.exit(REFUSED)


def main() -> None:
    """Runs ``program.py``, then ``tests.py`` with its names; writes the token to ``done`` if both came to an end."""
    folder, token, seconds, memory_mb, file_mb = sys.argv[1:]
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory_mb) << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(file_mb) << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sources = []
    for name in ("program.py", "tests.py"):
        with open(name, encoding="utf-8") as file:
            sources.append((file.read(), name))
        os.remove(name)  # the program shall not read what it is tested with
    sys.argv = ["program.py"]
    sys.path.insert(0, folder)
    _restrict()
    names = {"__name__": "__main__"}
    for source, name in sources:
        try:
            exec(compile(source, name, "exec"), names)
        except SystemExit as end:  # a usual way to end a program
            if end.code not in (None, 0):
                raise
    sys.stdout.flush()
    with open(os.path.join(folder, "done"), "w", encoding="utf-8") as file:
        file.write(token)


if __name__ == "__main__":
    main()
