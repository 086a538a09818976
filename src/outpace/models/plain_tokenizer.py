"""A folder's tokenizer straight on the ``tokenizers`` library: the same ids and texts, without importing transformers.

A folder is read here where transformers would take its ``tokenizer.json`` as it is, or where the file's pipeline is
already the one that its class builds (:mod:`outpace.models.tokenizer_class`). All else, such as settings that are not
known to leave the encoding alone, is left to transformers (None).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.errors import BadInput
from outpace.core.files import read_json
from outpace.models.tokenizer_class import GENERIC, REBUILT, NotPlain, check_rebuilt, chosen_class
from outpace.models.tokenizers import HFTokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_WITHOUT_EFFECT = """
add_bos_token add_eos_token add_prefix_space backend clean_up_tokenization_spaces errors is_local legacy
local_files_only max_length model_input_names model_max_length name_or_path pad_to_multiple_of pad_token_type_id
padding_side processor_class return_token_type_ids sp_model_kwargs spaces_between_special_tokens
special_tokens_map_file stride tokenizer_class tokenizer_file truncation_side truncation_strategy
use_default_system_prompt
"""
"""Keys of tokenizer_config.json that change neither ids nor texts where tokenizer.json is there."""
_READ = ("added_tokens_decoder", "additional_special_tokens", "chat_template", "extra_special_tokens")
_KNOWN_KEYS = frozenset([*_WITHOUT_EFFECT.split(), *_READ])

_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


@dataclass(eq=False)
class PlainTokenizer:
    """A tokenizer and its special tokens, answering those calls of a transformers tokenizer that HFTokenizer makes.

    ``named``: special tokens by name (``bos_token``), as templates see them. ``extra``: special tokens without one.
    """

    backend_tokenizer: Tokenizer
    named: Mapping[str, str]
    extra: Sequence[str] = ()
    chat_template: str | None = None
    added_tokens_decoder: Mapping[int, AddedToken] = field(init=False)

    def __post_init__(self) -> None:
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    @cached_property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens, named and others."""
        ids = {str(token.content): index for index, token in self.added_tokens_decoder.items()}
        return [ids[token] for token in dict.fromkeys([*self.named.values(), *self.extra])]

    @property
    def eos_token_id(self) -> int | None:
        """The id of ``eos_token``."""
        token = self.named.get("eos_token")
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        """Every token string and its id."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def decode(self, ids: list[int], *, skip_special_tokens: bool, **_: Any) -> str:
        """Text of ids."""
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: int | list[int]) -> Any:
        """The token string of an id, None for one without; a list for a list."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(one) for one in ids]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **_: Any
    ) -> str:
        """The text of a conversation up to the answer's beginning. Raises whatever the template raises."""
        from outpace.models.chat_template import render

        return render(self.chat_template or "", messages, self.named, tools)


def plain_tokenizer(folder: Path) -> HFTokenizer | None:
    """The tokenizer in a folder, read without transformers; None where only transformers reads it exactly."""
    try:
        return HFTokenizer(_read(folder))
    except (NotPlain, BadInput):
        return None


def _read(folder: Path) -> PlainTokenizer:
    files = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    if not {"tokenizer.json", "tokenizer_config.json", "config.json"} <= files or "tekken.json" in files:
        raise NotPlain
    model, config = read_json(folder / "config.json"), read_json(folder / "tokenizer_config.json")
    if "auto_map" in model:
        raise NotPlain
    backend = _backend(folder / "tokenizer.json")
    added = {str(token.content): (index, token) for index, token in backend.get_added_tokens_decoder().items()}
    kind = chosen_class(model, config, backend)
    settings = _settings(folder, files, config)
    _check_keys(settings)
    defaults: Mapping[str, str] = {}
    if kind != GENERIC:
        check_rebuilt(REBUILT[kind], backend, added)
        if settings.get("add_prefix_space"):
            raise NotPlain
        defaults = REBUILT[kind].defaults
    _check_added(settings.get("added_tokens_decoder"), added, whole=kind != GENERIC)
    named = {**defaults, **{key: value for key, value in settings.items() if key.endswith("_token")}}
    named = {key: _content(value) for key, value in named.items() if value is not None and not isinstance(value, bool)}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named, extra = named | {key: _content(value) for key, value in extra.items()}, []
    if not isinstance(extra, list):
        raise NotPlain
    others = [_content(one) for one in extra]
    if any(token not in added for token in (*named.values(), *others)):
        raise NotPlain  # transformers would add it
    if kind != GENERIC and not all(added[token][1].special for token in (*named.values(), *others)):
        raise NotPlain
    return PlainTokenizer(backend, named, others, _template(folder, files, settings.get("chat_template")))


def _backend(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions; transformers says what is wrong
        raise NotPlain from error
    if backend.padding is not None:
        raise NotPlain
    return backend


def _settings(folder: Path, files: set[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json, and where it lists no added tokens what special_tokens_map.json puts over it."""
    found = dict(config)
    if "added_tokens_decoder" in found:
        return found
    if "added_tokens.json" in files:
        raise NotPlain
    if "special_tokens_map.json" in files:
        found |= read_json(folder / "special_tokens_map.json")
    return found


def _check_keys(settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        if key in _KNOWN_KEYS or (key.endswith("_token") and not isinstance(value, bool)):
            continue
        if not (key == "split_special_tokens" and value is False):
            raise NotPlain


def _check_added(listed: Any, added: Mapping[str, tuple[int, AddedToken]], *, whole: bool) -> None:
    """Raise where ``added_tokens_decoder`` would add tokens to those of tokenizer.json, or take some away."""
    if listed is None:
        return
    if not isinstance(listed, dict) or (whole and len(listed) != len(added)):
        raise NotPlain
    for index, entry in listed.items():
        there = added.get(_content(entry)) if isinstance(entry, dict) else None
        if there is None or str(there[0]) != index:
            raise NotPlain
        if any(getattr(there[1], flag) != entry.get(flag) for flag in _FLAGS):
            raise NotPlain


def _content(value: Any) -> str:
    """The string of a token that is written as a string, or with its flags."""
    if isinstance(value, dict):
        value = value.get("content")
    if not isinstance(value, str):
        raise NotPlain
    return value


def _template(folder: Path, files: set[str], configured: Any) -> str | None:
    """The chat template: a file of its own before what tokenizer_config.json says."""
    if "additional_chat_templates" in files:
        raise NotPlain
    if "chat_template.jinja" in files:
        try:
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise NotPlain from error
    if isinstance(configured, list):
        named = {one.get("name"): one.get("template") for one in configured if isinstance(one, dict)}
        configured = named.get("default")
        if configured is None:
            raise NotPlain
    if configured is not None and not isinstance(configured, str):
        raise NotPlain
    return configured
