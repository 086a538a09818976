"""The forms in which a prompt is given: text, messages, token ids, tensors, or a batch of any of these.

| given | read as |
|---|---|
| a text | one user turn under the chat template; with ``raw`` the text as it is |
| a list of messages, ``{"role": ..., "content": ...}`` | a conversation; content is a text, or parts of type "text" |
| a list of whole numbers, a one-dimensional tensor or array | token ids, taken as they are |
| a two-dimensional tensor or array | a batch: one prompt a row |
| a mapping with "input_ids" (what a tokenizer returns) | the same, without the positions where "attention_mask" is 0 |
| any other list | a batch: every item is one prompt, in one of the forms above (not a batch itself) |

Tuples are read as lists. An empty list is refused: it could be any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from outpace.core.errors import BadInput, shown
from outpace.models.base import ChatTokenizer, Message

Array = np.ndarray[Any, Any]
ChatMessage = Mapping[str, Any]
SinglePrompt = str | Sequence[ChatMessage] | Sequence[int]
Batch = list[str] | list[list[int]] | list[list[dict[str, str]]] | list[Tensor] | tuple[str, ...]
Other = Tensor | Array | Mapping[str, Any] | Sequence[object]
"""Forms of which a type checker cannot tell whether they are a batch; the last is a batch of several forms."""
Prompt = SinglePrompt | Batch | Other
"""What generate takes as a prompt."""
_FORMS = "a text, a list of messages, token ids or a tensor of them, or a list of these"


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of every prompt, and whether they were given as a batch."""

    ids: list[list[int]]
    batch: bool


def read_prompts(tokenizer: ChatTokenizer, given: Any, raw: bool = False) -> Prompts:
    """A prompt, or a batch of them. Raises BadInput for what is none; in a batch it names which one."""
    if isinstance(given, Mapping):
        return _encoded(given, raw)
    if _is_array(given):
        return _rows(given)
    if not _is_batch(given):
        return Prompts([_one(tokenizer, given, raw)], batch=False)
    ids = []
    for number, one in enumerate(given, 1):
        try:
            ids.append(_item(tokenizer, one, raw))
        except BadInput as error:
            raise BadInput(f"prompt {number} of {len(given)}: {error}") from error
    return Prompts(ids, batch=True)


def read_messages(messages: Sequence[Any]) -> list[Message]:
    """Messages with their contents as text. Raises BadInput for what is no message and for parts that are no text."""
    return [_message(one) for one in messages]


def _is_batch(given: Any) -> bool:
    """Whether a list holds anything that is a prompt by itself, not numbers or messages alone."""
    if not isinstance(given, list | tuple):
        return False
    return any(isinstance(one, str | list | tuple) or _is_array(one) or _is_encoding(one) for one in given)


def _is_array(given: Any) -> bool:
    return isinstance(given, Tensor | np.ndarray)


def _is_encoding(given: Any) -> bool:
    return isinstance(given, Mapping) and "input_ids" in given


def _item(tokenizer: ChatTokenizer, given: Any, raw: bool) -> list[int]:
    """One prompt of a batch."""
    if _is_array(given) or isinstance(given, Mapping):
        found = _rows(given) if _is_array(given) else _encoded(given, raw)
        if found.batch and len(found.ids) != 1:
            raise BadInput(f"a batch of {len(found.ids)} inside a batch; put all prompts into one list")
        return found.ids[0]
    if _is_batch(given):
        raise BadInput("a list of prompts inside a batch; put all prompts into one list")
    return _one(tokenizer, given, raw)


def _one(tokenizer: ChatTokenizer, given: Any, raw: bool) -> list[int]:
    if isinstance(given, str):
        return tokenizer.encode(given) if raw else tokenizer.chat([{"role": "user", "content": given}])
    if not isinstance(given, list | tuple):
        raise BadInput(f"the prompt must be {_FORMS}, not {shown(given)}")
    if not given:
        raise BadInput(f"the prompt is an empty list; give {_FORMS}")
    if all(isinstance(one, Mapping) for one in given):
        if raw:
            raise BadInput("raw continues a text; messages need the chat template: leave out raw")
        return tokenizer.chat(read_messages(given))
    if all(isinstance(one, Integral) for one in given):
        return _ids(given)
    raise BadInput(f"the prompt is a list of {_kinds(given)}; give {_FORMS}")


def _kinds(given: Sequence[Any]) -> str:
    return ", ".join(dict.fromkeys(type(one).__name__ for one in given))


def _ids(given: Sequence[Any]) -> list[int]:
    if any(isinstance(one, bool | np.bool_) for one in given):
        raise BadInput("token ids must be whole numbers, not True or False")
    return [int(one) for one in given]


def _message(given: Any) -> Message:
    if not isinstance(given, Mapping):
        raise BadInput(f'a message must be a dict with "role" and "content", not {shown(given)}')
    content = given.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_part(one) for one in content)
    if not isinstance(content, str) or not isinstance(given.get("role"), str):
        raise BadInput('every message needs a text for "role" and for "content"')
    return {**given, "content": content}


def _part(given: Any) -> str:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind != "text" or not isinstance(given.get("text"), str):
        what = f"of type {kind!r}" if kind is not None and kind != "text" else shown(given)
        raise BadInput(f'a message\'s content must be text or parts of type "text", not a part {what}')
    return str(given["text"])


def _rows(given: Any, mask: Any = None) -> Prompts:
    """Ids of a tensor or array, (L,) or (B, L), where ``mask`` of the same shape is not 0."""
    rows = _whole_numbers("token ids", given)
    kept = None if mask is None else _whole_numbers("attention_mask", mask)
    if rows.ndim not in (1, 2):
        raise BadInput(f"token ids must have one dimension, or two for a batch, not {rows.ndim}")
    if kept is not None and kept.shape != rows.shape:
        raise BadInput(f"attention_mask has the shape {kept.shape}, and input_ids {rows.shape}; they must be equal")
    whole = np.atleast_2d(rows)
    masks = np.ones_like(whole) if kept is None else np.atleast_2d(kept)
    ids = [row[shown != 0].tolist() for row, shown in zip(whole, masks, strict=True)]
    if not ids:
        raise BadInput("the batch of token ids has no rows")
    for number, one in enumerate(ids, 1):
        if not one:
            raise BadInput(f"prompt {number} of {len(ids)}: the prompt is empty; give at least one token")
    return Prompts(ids, batch=rows.ndim == 2)


def _whole_numbers(name: str, given: Any) -> Array:
    if isinstance(given, Tensor):
        given = given.detach().cpu()
    try:
        found = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):
        raise BadInput(f"{name} must be whole numbers, with rows of equal length, not {shown(given)}") from None
    if found.size and not np.issubdtype(found.dtype, np.integer) and not (name != "token ids" and found.dtype == bool):
        raise BadInput(f"{name} must be whole numbers, not {found.dtype}")
    return found


def _encoded(given: Mapping[str, Any], raw: bool) -> Prompts:
    """What a tokenizer returned: input_ids, and an attention_mask that may leave some of them out."""
    if "role" in given:
        raise BadInput("a message alone is no prompt; put it into a list")
    if "input_ids" not in given:
        raise BadInput(
            f'a prompt that is a mapping must have "input_ids"; it has {", ".join(map(str, given)) or "nothing"}'
        )
    ids, mask = given["input_ids"], given.get("attention_mask")
    if _is_array(ids):
        return _rows(ids, mask)
    if isinstance(ids, list | tuple) and ids and all(isinstance(one, list | tuple) for one in ids):
        masks = [None] * len(ids) if mask is None else mask
        if len(masks) != len(ids):
            raise BadInput(f"attention_mask has {len(masks)} rows, and input_ids {len(ids)}; they must be equal")
        return Prompts([_rows(np.asarray(row), one).ids[0] for row, one in zip(ids, masks, strict=True)], batch=True)
    return _rows(_whole_numbers("token ids", ids), mask)
