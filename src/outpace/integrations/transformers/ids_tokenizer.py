"""IdsTokenizer: what stands for a tokenizer where there is none, as only token ids come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from outpace.core.errors import BadInput
from outpace.models.tokenizers import HFTokenizer


class _NoWords:
    """The part of a transformers tokenizer that is asked about before any text is."""

    chat_template = None
    eos_token_id = None
    added_tokens_decoder: Mapping[int, Any] = {}
    all_special_ids: Sequence[int] = ()

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": []}

    def get_vocab(self) -> dict[str, int]:
        return {}

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return None if isinstance(ids, int) else [None] * len(ids)


class IdsTokenizer(HFTokenizer):
    """A tokenizer without texts, for a model of ``vocab_size`` ids."""

    def __init__(self, model: Any) -> None:
        super().__init__(_NoWords())
        self._size = int(getattr(getattr(model, "config", None), "vocab_size", 0) or 0)

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str) -> list[int]:
        self._refuse()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self._refuse()

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def token_text(self, token: int) -> str:
        return ""

    def token_bytes(self, token: int) -> bytes | None:
        return None

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, answer: str = ""
    ) -> list[int]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise BadInput("this needs the model's tokenizer: give it to outpace.accelerate(model, tokenizer)")
