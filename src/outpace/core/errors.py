"""The errors that a user can cause, and mend."""


class OutpaceError(Exception):
    """Something the caller can put right. The message is one line: what is wrong and what to do."""


class BadInput(OutpaceError):
    """An argument, file or model that cannot be used as given. The command line exits with 2."""


class MissingExtra(BadInput):
    """An optional dependency is absent; the message carries the command that installs it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional package: pip install 'outpace[{extra}]'")
