"""Processes that end with the one that started them, also where that is killed (Linux)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_END_WITH_PARENT = """
import contextlib, ctypes, os, signal, sys
with contextlib.suppress(AttributeError):  # Linux has it
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(f"error: cannot start {sys.argv[1]}: {error.strerror}")
"""


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command, which gets SIGTERM where its parent ends; elsewhere than on Linux it is started as it is.

    The parent's thread that starts it counts as the parent: start it in one that lives as long as the process.
    """
    # Isolated: the environment is the command's, and may be made for another interpreter.
    return [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, *command]
