"""Which method drafts where nobody names one. It imports nothing: options name it as their default."""

DEFAULT_METHOD = "auto"
