"""A tokenizer's vocabulary as the grammar engine reads it: the bytes of every token. Made once for a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from threading import Lock
from typing import Any

from outpace.core.errors import MissingExtra
from outpace.core.lru import Lru
from outpace.core.text import encoded
from outpace.models.base import ChatTokenizer

_KEPT = 4
_TRIES: Lru[str, TokenTrie] = Lru(_KEPT)
"""By the fingerprint of the tokenizer."""
_LOCK = Lock()


@dataclass(eq=False, slots=True)
class TokenTrie:
    """``inner``: the engine's tokenizer. Its token ``size``, which no model has, stands for the end of an answer."""

    inner: Any
    size: int
    tokenizer: ChatTokenizer

    def spelled(self, text: bytes) -> list[int]:
        """Tokens that spell ``text``, as the tokenizer writes it where it can."""
        try:
            written = text.decode()
        except UnicodeDecodeError:
            return [int(token) for token in self.inner.greedy_tokenize(text.decode("utf-8", "ignore"))]
        return encoded(self.tokenizer, [written])[0]


class _Vocabulary:
    """What the engine asks of a tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        size = len(tokenizer)
        found = [tokenizer.token_bytes(token) for token in range(size)]
        self.tokens = [b"<%d>" % at if one is None else one for at, one in enumerate(found)] + [b"<end>"]
        # A token without bytes (an unused id, say) would be allowed anywhere and lead nowhere.
        self.special_token_ids = [at for at, one in enumerate(found) if not one] + [size]
        self.eos_token_id, self.bos_token_id = size, None

    def __call__(self, text: bytes | str) -> Sequence[int]:
        return []  # asked only where the engine forces one spelling, which it is told not to


def token_trie(tokenizer: ChatTokenizer) -> TokenTrie:
    """The trie of a tokenizer. Raises MissingExtra where the engine is not installed."""
    key = tokenizer.fingerprint
    with _LOCK:
        known = _TRIES.get(key)
        if known is None:
            llguidance = engine()
            vocabulary = _Vocabulary(tokenizer)
            wrapper = llguidance.TokenizerWrapper(vocabulary)
            size = len(tokenizer)
            slices = llguidance.LLTokenizer.json_slices()  # without them a mask inside a string takes milliseconds
            inner = llguidance.LLTokenizer(wrapper, n_vocab=size + 1, eos_token=size, slices=slices)
            known = TokenTrie(inner, size, tokenizer)
            _TRIES.put(key, known)
    return known


def installed() -> bool:
    """Whether the engine is there."""
    return find_spec("llguidance") is not None


def engine() -> Any:
    """The package llguidance. Raises MissingExtra where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise MissingExtra("generating under a grammar", "grammar") from None
    return llguidance
