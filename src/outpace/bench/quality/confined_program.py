"""Runs one program with its tests where it can do nothing but compute. Started as a script, by :mod:`sandbox`.

The process confines itself before it runs a line of the program, and nothing that it does can undo this: memory, CPU
time and file sizes are limited (setrlimit), and Linux lets through only the system calls of :data:`_CALLS` (seccomp):
no process, no thread, no signal, no socket, and files are opened for reading alone. Needs the standard library only.

On standard input: a JSON object with ``program``, ``tests``, ``entry_point``, ``seconds``, ``memory`` (bytes), ``word``
and ``report`` (a file descriptor). The word is written to ``report`` when all tests have passed.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import types
from typing import Any

CANNOT_CONFINE = 97
"""Exit code where the system has no such filter: then nothing was run."""
UNCONFINED = b"unconfined "
"""Written before the word to ``report`` in that case, as a program could end with the same code."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS: dict[str, tuple[int | None, int | None]] = {
    # Numbers on x86-64 and ARM64; None: the machine has no such call.
    **{"read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67)},
    **{"close": (3, 57), "lseek": (8, 62), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None)},
    **{"newfstatat": (262, 79), "statx": (332, 291), "access": (21, None), "faccessat": (269, 48)},
    **{"faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61)},
    **{"getcwd": (79, 17), "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72)},
    **{"mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233)},
    **{"brk": (12, 214), "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293)},
    **{"rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132)},
    **{"restart_syscall": (219, 128), "arch_prctl": (158, None), "sched_yield": (24, 124)},
    **{"sched_getaffinity": (204, 123), "nanosleep": (35, 101), "clock_nanosleep": (230, 115)},
    **{"clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None)},
    **{"times": (100, 153), "getrusage": (98, 165), "sysinfo": (99, 179), "uname": (63, 160)},
    **{"getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175)},
    **{"getgid": (104, 176), "getegid": (108, 177), "getrandom": (318, 278)},
    **{"exit": (60, 93), "exit_group": (231, 94)},
}
_OPENS = {"open": ((2, None), 1), "openat": ((257, 56), 2)}
"""Calls that open files, and which argument holds the flags."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # 1 is EPERM
_DIE_WITH_PARENT, _NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 1, 38, 22, 2


def _instructions(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter, in the instructions of the Berkeley packet filter: (code, jump if true, jump if false, value)."""
    at = list(_ARCHITECTURES).index(machine)
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for numbers in _CALLS.values():
        if (number := numbers[at]) is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for numbers, argument in _OPENS.values():
        if (number := numbers[at]) is not None:
            flags = [(_LOAD, 0, 0, 16 + 8 * argument), (_ANY_BIT, 0, 1, _WRITES), (_RETURN, 0, 0, _REFUSE)]
            code += [(_EQUAL, 0, 4, number), *flags, (_RETURN, 0, 0, _ALLOW)]
    return [*code, (_RETURN, 0, 0, _REFUSE)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _confine(seconds: float, memory: int) -> None:
    """Raises OSError or ValueError where the system does not confine."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCHITECTURES:
        raise OSError(f"no filter for {sys.platform} on {machine}")
    whole = int(seconds) + 1
    for kind, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, whole),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(kind, (limit, limit))
    code = b"".join(struct.pack("HBBI", *one) for one in _instructions(machine))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)  # one that sleeps would stay for ever
    program = _Program(len(code) // 8, code)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "the system refuses a filter of system calls")


def main() -> None:
    """Confine this process, and run what standard input gives."""
    task = json.load(sys.stdin)
    report, word = task["report"], task["word"].encode()
    try:
        _confine(task["seconds"], task["memory"])
    except (OSError, ValueError):
        os.write(report, UNCONFINED + word)
        os._exit(CANNOT_CONFINE)
    module = types.ModuleType("answer")
    sys.modules["answer"] = module  # where dataclasses look their annotations up
    space: dict[str, Any] = module.__dict__
    for name, source in (("answer", task["program"]), ("tests", task["tests"])):
        exec(compile(source, name, "exec", dont_inherit=True), space)
    space["check"](space[task["entry_point"]])
    os.write(report, word)


if __name__ == "__main__":
    main()
