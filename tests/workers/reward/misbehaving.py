"""A reward function that does to each sample what its ``extra_info["do"]`` says. Loaded by path, as users' are."""

import os
import signal
import subprocess
import sys
import time

CALLS = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global CALLS
    CALLS += 1
    return ACTIONS[extra_info.get("do", "score")](extra_info)


def sleep_forever(info):
    while True:
        time.sleep(1000)


def hold_the_interpreter(info):
    import re

    re.match(r"(a+)+$", "a" * 40 + "b")  # one call into C that never comes back to Python


def fork_and_sleep(info):
    leave_children(info)
    sleep_forever(info)


def leave_children(info):
    """One in the process group, and one that has gone out of it as daemons do."""
    sleeper = [sys.executable, "-c", f"import time; time.sleep(1000)  # {os.environ.get('PODIUM_TEST_RUN', '')}"]
    subprocess.Popen(sleeper)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sleeper[0], sleeper)
        os._exit(0)
    return 1.0


def fork_twins(info):
    """Parent and child both return."""
    os.fork()
    return 1.0


def exhaust_memory(info):
    return len(bytearray(8 << 30))


def exhaust_memory_bit_by_bit(info):
    held = []
    while True:
        held.append(bytearray(32 << 20))


def segfault(info):
    import ctypes

    ctypes.string_at(0)


def raise_error(info):
    raise KeyError("no\nsuch key")


def use_alarm(info):
    def stop(*_):
        raise TimeoutError("alarm")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        sleep_forever(info)
    except TimeoutError:
        return 0.5


def leave_an_alarm(info):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    return 1.0


def print_a_gigabyte(info):
    line = b"x" * (1 << 20)
    for _ in range(info.get("mib", 1024)):
        os.write(1, line)
    return 1.0


class Local:
    """No driver has this class."""


ACTIONS = {
    "score": lambda info: float(info.get("score", 1.0)),
    "sleep_forever": sleep_forever,
    "hold_the_interpreter": hold_the_interpreter,
    "fork_and_sleep": fork_and_sleep,
    "leave_children": leave_children,
    "fork_twins": fork_twins,
    "exhaust_memory": exhaust_memory,
    "exhaust_memory_bit_by_bit": exhaust_memory_bit_by_bit,
    "segfault": segfault,
    "exit": lambda info: os._exit(3),
    "sys_exit": lambda info: sys.exit(1),
    "raise": raise_error,
    "nan": lambda info: float("nan"),
    "no_score": lambda info: {"acc": 1},
    "abstain": lambda info: {"abstain": "nothing to\ncompare with"},
    "unpicklable": lambda info: {"score": 1, "f": lambda: 0},
    "local": lambda info: {"score": 1, "object": Local()},
    "close_output": lambda info: os.closerange(1, 3) or 1.0,
    "close_everything": lambda info: os.closerange(0, 4096) or 1.0,
    "alarm": use_alarm,
    "leave_an_alarm": leave_an_alarm,
    "print": print_a_gigabyte,
    "nap": lambda info: time.sleep(info["s"]) or 1.0,
    "environment": lambda info: {"score": 1, "torch": "torch" in sys.modules, "pid": os.getpid(), "calls": CALLS},
}
