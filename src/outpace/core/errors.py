"""The errors that a user can cause, and mend."""

_LONGEST = 200
"""Characters of somebody else's message that a message of ours holds, at most."""


class OutpaceError(Exception):
    """Something the caller can put right. The message is one line: what is wrong and what to do."""


class BadInput(OutpaceError):
    """An argument, file or model that cannot be used as given. The command line exits with 2."""


def said(error: BaseException, where: str = "") -> str:
    """What somebody else's code raised, in one line: its type, ``where`` in that code, and its message, shortened."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    name = type(error).__name__ + (f" in {where}" if where else "")
    return f"{name}: {text}" if text else name


class MissingExtra(BadInput):
    """An optional dependency is absent; the message carries the command that installs it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional package: pip install 'outpace[{extra}]'")
