"""The errors that a user can cause, and mend."""

import errno

LONGEST = 320
"""Characters of another library's message that a line for the user repeats."""
_MORE = " ..."


class OutpaceError(Exception):
    """Something the caller can put right. The message is one line: what is wrong and what to do."""


class BadInput(OutpaceError):
    """An argument, file or model that cannot be used as given. The command line exits with 2."""


def shortened(text: str, longest: int = LONGEST) -> str:
    """``text`` in one line of at most ``longest`` characters: what is longer ends after a whole word, with an ellipsis,
    or within its first word where that is as long."""
    line = " ".join(text.split())
    if len(line) <= longest:
        return line
    most = longest - len(_MORE)
    end = line.rfind(" ", 0, most + 1)
    return line[: end if end > 0 else most] + _MORE


def shown(value: object) -> str:
    """A value of a wrong type, for a message: its type, and how it is written where that is short."""
    kind = type(value).__name__
    if value is None:
        return "None"
    text = repr(value)
    short = len(text) <= 40 and "\n" not in text and " object at 0x" not in text
    return f"{kind} {text}" if short else f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def said(error: BaseException, where: str = "") -> str:
    """What somebody else's code raised, in one line: its type, ``where`` in that code, and its message, shortened."""
    text = shortened(str(error))
    name = type(error).__name__ + (f" in {where}" if where else "")
    return f"{name}: {text}" if text else name


def out_of_memory(error: BaseException) -> bool:
    """Whether memory, of the machine or of a device, was too small: Python's, the system's or PyTorch's error."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


class MissingExtra(BadInput):
    """An optional dependency is absent; the message carries the command that installs it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional package: pip install 'outpace[{extra}]'")
