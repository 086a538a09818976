"""How models write calls of tools, by their chat templates.

============ ============================================================== =======================================
format       how a call is written                                          known by, in the chat template
============ ============================================================== =======================================
hermes       ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``   ``<tool_call>`` and ``"arguments"``
                                                                            (Hermes, Qwen)
mistral      ``[TOOL_CALLS]``, then a JSON list of such objects, or         ``[TOOL_CALLS]``; the second way by
             ``[TOOL_CALLS]name[ARGS]{...}`` for each call                  ``[ARGS]``
llama3       ``{"name": ..., "parameters": {...}}``, alone, joined by ``;`` ``"parameters"`` and ``<|start_header_id|>``
             or after ``<|python_tag|>``
============ ============================================================== =======================================

Small models that were taught ``<tool_call>`` often write the object in a Markdown code block instead. That is read as a
call where the answer begins with it.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NAMES = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Format:
    """A way to write calls.

    ``markers``: what a call begins with, anywhere in an answer, and what ends it ("": nothing does). ``openings``: the
    same for calls that only stand at an answer's beginning. ``inside``: further special tokens of a call. ``listed``:
    after the marker a list of objects, or ``name{...}``. ``begin``, ``name``, ``arguments``: what the server writes of
    a call that has to be: its beginning, the beginning of a name, and what stands between name and arguments.
    """

    markers: Mapping[str, str]
    begin: str
    name: str
    arguments: str
    openings: Mapping[str, str] = field(default_factory=dict)
    inside: tuple[str, ...] = ()
    listed: bool = False
    short_ids: bool = False
    closing: str = ""
    """What ends a call, after its arguments."""
    ends_with: str = ""
    """The text after which an answer with a single call may end."""

    def forced(self, name: str | None) -> str:
        """The beginning of an answer that has to be a call: of this function, or of one that the model names."""
        return self.begin + self.name + (name + self.arguments if name is not None else "")

    def call_id(self) -> str:
        """An id as OpenAI writes it; Mistral's templates demand nine letters and digits."""
        if self.short_ids:
            return "".join(secrets.choice(_NAMES) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


# The spaces before values are left to the model: its tokens begin with them.
HERMES = Format(
    {"<tool_call>": "</tool_call>"},
    "<tool_call>\n",
    '{"name": "',
    '", "arguments":',
    openings={"```json": "```", "```": "```", "": ""},
    closing="}\n</tool_call>",
    ends_with="</tool_call>",
)
LLAMA3 = Format({"<|python_tag|>": ""}, "", '{"name": "', '", "parameters":', openings={"": ""}, closing="}")
MISTRAL = Format(
    {"[TOOL_CALLS]": "]"}, "[TOOL_CALLS]", '[{"name": "', '", "arguments":', listed=True, short_ids=True, closing="}]"
)
MISTRAL_BARE = Format(
    {"[TOOL_CALLS]": ""}, "[TOOL_CALLS]", "", "[ARGS]", inside=("[CALL_ID]", "[ARGS]"), listed=True, short_ids=True
)


def format_of(template: str) -> Format | None:
    """The format of a chat template; None for one that shows no tools, or writes calls in another way."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        xml = "<function=" in template or "<arg_key>" in template
        return None if xml or re.search(r"""["']arguments\\?["']""", template) is None else HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL_BARE if "[ARGS]" in template else MISTRAL
    if "<|start_header_id|>" in template and re.search(r"""["']parameters\\?["']""", template):
        return LLAMA3
    return None


@dataclass(slots=True)
class Call:
    """One call. ``arguments`` is what the model wrote, which should be JSON; ``complete``: it is whole."""

    name: str
    id: str
    arguments: str = ""
    complete: bool = False

    def shown(self) -> dict[str, Any]:
        """As it stands in an answer."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
