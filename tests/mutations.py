"""Damaged copies of files: bytes, lengths and types changed at random, the same for the same seed."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEEP = 20_000
_INTEGERS = (0, 1, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 10**12, 2**63 - 1, 2**63, 2**64 - 1)


def damage(path: Path, rng: random.Random) -> str:
    """Change a file in place; says how."""
    content = path.read_bytes()
    changes: list[Callable[[bytes, random.Random], bytes]] = [_bytes]
    if path.suffix in (".json", ".jsonl"):
        changes = [_lines, _lines, _lines, _bytes]
    elif path.suffix == ".safetensors":
        changes = [_safetensors, _safetensors, _bytes]
    change = rng.choice(changes)
    path.write_bytes(change(content, rng))
    return f"{path.name}, {change.__name__.strip('_')}"


def _bytes(content: bytes, rng: random.Random) -> bytes:
    """Bits flipped, a part cut off, doubled, blanked or overwritten with a number, more often near the beginning."""
    data, size = bytearray(content), len(content)
    at = rng.randrange(min(size, 3000)) if rng.random() < 0.6 else rng.randrange(size)
    length = rng.choice((1, 2, 4, 8, 64, 1000))
    match rng.randrange(7):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            for _ in range(length):
                data[rng.randrange(size)] = rng.randrange(256)
        case 2:
            del data[at:]
        case 3:
            del data[at : at + length]
        case 4:
            data[at:at] = data[at : at + length]
        case 5:
            data[at : at + length] = bytes([rng.choice((0, 255))]) * length
        case 6:
            form = rng.choice(("<I", "<Q"))
            number = struct.pack(form, rng.choice(_INTEGERS) % 2 ** (32 if form == "<I" else 64))
            data[at : at + len(number)] = number
    return bytes(data)


def _lines(content: bytes, rng: random.Random) -> bytes:
    """A JSON value changed: of the whole file, or of one of its lines."""
    try:
        return _changed_json(content, rng)
    except ValueError:
        lines = content.splitlines() or [b"{}"]
        at = rng.randrange(len(lines))
        try:
            lines[at] = _changed_json(lines[at], rng)
        except ValueError:
            return _bytes(content, rng)
        return b"\n".join(lines) + b"\n"


def _safetensors(content: bytes, rng: random.Random) -> bytes:
    """The header changed, with the length that it then has; or numbers that are not finite."""
    (length,) = struct.unpack("<Q", content[:8])
    header, rest = content[8 : 8 + length], bytearray(content[8 + length :])
    if rng.random() < 0.3:
        value = rng.choice((b"\x00\x00\xc0\x7f", b"\x80\x7f\x80\xff"))  # NaN in float32; infinities in bfloat16
        at = rng.randrange(max(1, len(rest) // 4)) * 4
        rest[at : at + 4] = value
        return content[: 8 + length] + bytes(rest)
    changed = _changed_json(header, rng)
    return struct.pack("<Q", len(changed)) + changed + bytes(rest)


def _changed_json(content: bytes, rng: random.Random) -> bytes:
    """One place of a JSON value replaced, removed or added. Raises ValueError for what is no JSON object or array."""
    value = json.loads(content)
    places = list(_places(value))
    if not places:
        raise ValueError("a value without places")
    holder, key = rng.choice(places)
    if rng.random() < 0.2:
        del holder[key]
    elif rng.random() < 0.1:
        if isinstance(holder, list):
            holder.append(_odd(rng))
        else:
            holder[rng.choice(("", "new", "\ud800", "kind", "format"))] = _odd(rng)
    else:
        holder[key] = _odd(rng, holder[key])
    text = json.dumps(value)
    if rng.random() < 0.1:  # too deep for json.dumps, so in text
        text = text.replace("null", "[" * DEEP + "]" * DEEP, 1) if "null" in text else "[" * DEEP + text + "]" * DEEP
    return text.encode()


def _places(value: Any) -> Any:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _odd(rng: random.Random, now: Any = None) -> Any:
    """A value of another type or size; of numbers also one nearby."""
    near = [now + 1, now - 1, -now, now * 2] if isinstance(now, int | float) else []
    texts = ["", "x", "\ud800", "9" * 5000, "../../x"]
    numbers = [0, 1, -1, 10**12, -(2**63), 10**400, 1.5, 1e308, float("nan"), float("-inf")]
    return rng.choice([None, True, [], {}, [[]], {"a": {}}, [now], *near, *texts, *numbers])
