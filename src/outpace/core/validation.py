"""Values that somebody else wrote, read by a pydantic model; what it refuses becomes one line for the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from outpace.core.errors import BadInput

M = TypeVar("M", bound=BaseModel)


class StrictModel(BaseModel):
    """Settings that refuse fields which they do not have, and numbers that are not finite."""

    # Validators are built when the model is first used: most commands use a few of all methods' settings.
    model_config = ConfigDict(extra="forbid", defer_build=True, allow_inf_nan=False)


def validated(model: type[M], values: Mapping[str, Any], refusal: Callable[[str, str], BadInput]) -> M:
    """``values`` as ``model`` reads them.

    Raises ``refusal(key, reason)``, a BadInput, for the first value that the model refuses. The key is "settings" where
    values that are valid alone do not go together.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as refused:
        first = refused.errors()[0]
        reason = "there is no such name" if first["type"] == "extra_forbidden" else first["msg"]
        raise refusal(".".join(map(str, first["loc"])) or "settings", reason) from None


def known_fields(model: type[BaseModel]) -> str:
    """The names of a model's fields, for the message about another one."""
    return ", ".join(model.model_fields) or "it has none"
