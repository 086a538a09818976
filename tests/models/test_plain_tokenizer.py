"""Tokenizers that are read without transformers give what transformers' own give, or leave the folder to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.models.auto import tokenization_auto

from outpace.core.errors import BadInput
from outpace.models import tokenizer_class
from outpace.models.gguf_cache import converted
from outpace.models.plain_tokenizer import PlainTokenizer, plain_tokenizer
from outpace.models.source import resolve
from outpace.models.stop_ids import configurations, stop_ids_of
from outpace.models.tokenizers import HFTokenizer
from outpace.prompts.questions import load_prompts
from test_models import TEMPLATE, tiny_tokenizer

TEXT = " ".join(prompt.turns[0] for prompt in load_prompts(None))[:20_000]
TEXTS = [
    "",
    " ",
    "Hello, wörld!",
    " 你好 🙂 def f(x):\n\treturn x  # 1234\n",
    "  \n\n x",
    "naïve e\u0301",
    "<|im_end|>a</s> <s>b<|tool|>c",
    "isn't",
    "<0x41>▁x",
]
SMALL = settings(max_examples=25, deadline=None)
Change = Callable[[Path], None]


def trained(inner: Tokenizer, trainer: Any, text: str = TEXT) -> Tokenizer:
    inner.train_from_iterator([text], trainer)
    return inner


def byte_level(size: int = 600) -> Tokenizer:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return trained(inner, trainers.BpeTrainer(vocab_size=size, special_tokens=specials, initial_alphabet=alphabet))


def pieces() -> Tokenizer:
    """As SentencePiece's: spaces are characters, a text begins with one, unknown characters fall to bytes."""
    inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    specials = ["<unk>", "<s>", "</s>"]
    trained(inner, trainers.BpeTrainer(vocab_size=500, special_tokens=specials))
    state = json.loads(inner.to_str())
    for value in range(256):
        state["model"]["vocab"][f"<0x{value:02X}>"] = len(state["model"]["vocab"])
    inner = Tokenizer.from_str(json.dumps(state))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return inner


def unigram() -> Tokenizer:
    inner = Tokenizer(models.Unigram())
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    return trained(inner, trainer)


LLAMA_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CHAT_NAMES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def saved(made: Any, place: Path, model_type: str = "llama", template: str | None = TEMPLATE) -> Path:
    made.chat_template = template
    made.save_pretrained(place)
    (place / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": len(made)}))
    return place


def edit(place: Path, **changes: Any) -> None:
    """Change keys of tokenizer_config.json; None removes one."""
    config = json.loads((place / "tokenizer_config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (place / "tokenizer_config.json").write_text(json.dumps(kept))


def _bytes_with_added(place: Path) -> None:
    made = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **CHAT_NAMES)
    made.add_tokens(["    ", AddedToken("<think>", lstrip=True), AddedToken("<|tool|>", special=True)])
    saved(made, place)


def _tiny(place: Path) -> None:
    saved(tiny_tokenizer(), place)


def _no_template(place: Path) -> None:
    saved(tiny_tokenizer(), place, template=None)


def _pieces(place: Path) -> None:
    saved(PreTrainedTokenizerFast(tokenizer_object=pieces(), **LLAMA_NAMES), place, "mistral")


def _unigram(place: Path) -> None:
    saved(PreTrainedTokenizerFast(tokenizer_object=unigram(), **LLAMA_NAMES), place, "phi3")


def _asks_for_bos(place: Path) -> None:
    """``add_bos_token``, which transformers does not honour beside a tokenizer.json."""
    saved(PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<|im_start|>", **CHAT_NAMES), place)
    edit(place, add_bos_token=True, add_eos_token=True, legacy=False, clean_up_tokenization_spaces=True)


def _truncates(place: Path) -> None:
    inner = byte_level()
    inner.enable_truncation(3)
    saved(PreTrainedTokenizerFast(tokenizer_object=inner, **CHAT_NAMES), place)


def _as_version_4_writes(place: Path) -> None:
    """Added tokens in tokenizer_config.json, special ones in special_tokens_map.json, some with their flags."""
    made = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **CHAT_NAMES)
    made.add_tokens([AddedToken("<|tool|>", special=True)])
    saved(made, place)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(index): {"content": str(token), "special": token.special} | flags
        for index, token in made.added_tokens_decoder.items()
    }
    edit(
        place,
        tokenizer_class="PreTrainedTokenizerFast",
        added_tokens_decoder=added,
        additional_special_tokens=["<|tool|>"],
        eos_token={"__type": "AddedToken", "content": "<|im_end|>", "special": True, **flags},
    )


def _special_tokens_map(place: Path) -> None:
    saved(PreTrainedTokenizerFast(tokenizer_object=byte_level(), **CHAT_NAMES), place)
    edit(place, eos_token="<|endoftext|>", additional_special_tokens=None)
    entry = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    listed = {"eos_token": entry, "additional_special_tokens": ["<|im_start|>"]}
    (place / "special_tokens_map.json").write_text(json.dumps(listed))


def _named_by_the_model(place: Path) -> None:
    """Special tokens under names of the model's own."""
    saved(PreTrainedTokenizerFast(tokenizer_object=byte_level(), **CHAT_NAMES), place)
    edit(place, image_token="<|im_start|>", extra_special_tokens={"audio_token": "<|endoftext|>"})
    (place / "chat_template.jinja").write_text("{{ image_token }}{{ audio_token }}{{ messages[0].content }}")


def _llama_by_name(place: Path) -> None:
    """A class of the wrong name above a byte-level vocabulary."""
    saved(PreTrainedTokenizerFast(tokenizer_object=byte_level(), **CHAT_NAMES), place)
    edit(place, tokenizer_class="LlamaTokenizerFast")


def _vocabulary(inner: Tokenizer) -> dict[str, Any]:
    model = json.loads(inner.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def _qwen(place: Path, model_type: str = "qwen2") -> None:
    made = Qwen2Tokenizer(**_vocabulary(byte_level()), eos_token="<|im_end|>")
    made.add_tokens([AddedToken("<|tool|>", special=True), AddedToken("<think>", special=False)])
    saved(made, place, model_type)


def _qwen3(place: Path) -> None:
    _qwen(place, "qwen3")


def _qwen_by_type(place: Path) -> None:
    """transformers takes Qwen2's class for this type, whatever the folder names."""
    _qwen(place)
    edit(place, tokenizer_class="TokenizersBackend")


def _gpt2(place: Path) -> None:
    made = GPT2Tokenizer(**_vocabulary(byte_level()))
    saved(made, place)


READ: dict[str, Change] = {
    change.__name__.strip("_"): change
    for change in (
        _tiny,
        _no_template,
        _bytes_with_added,
        _pieces,
        _unigram,
        _asks_for_bos,
        _truncates,
        _as_version_4_writes,
        _special_tokens_map,
        _named_by_the_model,
        _llama_by_name,
        _qwen,
        _qwen3,
        _qwen_by_type,
        _gpt2,
    )
}


@pytest.fixture(scope="module", params=[*READ, pytest.param("smollm2", marks=pytest.mark.model)])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[HFTokenizer, HFTokenizer]:
    """The same folder's tokenizer: read without transformers, and with it."""
    if request.param == "smollm2":
        import torch

        place = converted(resolve("smollm2").path, torch.bfloat16)
    else:
        place = tmp_path_factory.mktemp(request.param)
        READ[request.param](place)
    plain = plain_tokenizer(place)
    assert plain is not None and isinstance(plain.inner, PlainTokenizer)
    return plain, HFTokenizer(AutoTokenizer.from_pretrained(place, local_files_only=True))


def same(plain: HFTokenizer, theirs: HFTokenizer, text: str) -> None:
    ids = theirs.encode(text)
    assert plain.encode(text) == ids
    assert plain.decode(ids) == theirs.decode(ids)
    assert plain.encode_batch([text, "x"]) == theirs.encode_batch([text, "x"])
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    for conversation in (turns[:1], turns):
        assert plain.chat(conversation) == theirs.chat(conversation)


def test_every_answer_is_that_of_transformers(pair: tuple[HFTokenizer, HFTokenizer]) -> None:
    plain, theirs = pair
    assert json.loads(plain.inner.backend_tokenizer.to_str()) == json.loads(theirs.inner.backend_tokenizer.to_str())
    for text in TEXTS:
        same(plain, theirs, text)
    assert len(plain) == len(theirs) and plain.fingerprint == theirs.fingerprint
    assert (plain.template, plain.has_chat_template) == (theirs.template, theirs.has_chat_template)
    ids = range(len(theirs) + 2)
    assert [plain.token_text(one) for one in ids] == [theirs.token_text(one) for one in ids]
    assert [plain.token_bytes(one) for one in ids] == [theirs.token_bytes(one) for one in ids]
    assert stop_ids_of([], plain, 10**6) == stop_ids_of([], theirs, 10**6)
    assert sorted(plain.inner.all_special_ids) == sorted(theirs.inner.all_special_ids)
    assert plain.inner.named == theirs.inner.special_tokens_map


def test_any_text_gets_the_ids_that_transformers_gives(pair: tuple[HFTokenizer, HFTokenizer]) -> None:
    alphabet = st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("ab 1\n▁"))
    pieces_of_text = st.one_of(
        st.text(alphabet, max_size=8), st.sampled_from(["<|im_end|>", "<s>", "the ", "  ", "1234"])
    )

    @SMALL
    @given(st.lists(pieces_of_text, max_size=6).map("".join))
    def check(text: str) -> None:
        same(*pair, text)

    check()


def test_refusals_of_a_template_and_of_a_conversation_read_the_same(tmp_path: Path) -> None:
    _tiny(tmp_path)
    plain, theirs = plain_tokenizer(tmp_path), HFTokenizer(AutoTokenizer.from_pretrained(tmp_path))
    assert plain is not None
    for conversation in (
        [],
        [{"role": "user"}],
        [{"role": "system", "content": "x"}],
        [{"role": "user", "content": "\ud800"}],
    ):
        with pytest.raises(BadInput) as ours:
            plain.chat(conversation)
        with pytest.raises(BadInput) as reference:
            theirs.chat(conversation)
        assert str(ours.value) == str(reference.value)


# --- chat templates

TEMPLATES = {
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "white space": "{% for m in messages %}\n  {% if loop.first %}\n  {{ m.role }}\n {% endif %}\n{% endfor %}\n",
    "tools and documents": "{% if tools is none and documents is none %}{{ messages|length }}{% endif %}",
    "undefined": "{{ nothing }}{% if enable_thinking is defined %}x{% endif %}{{ messages[0].missing }}",
    "json": "{{ messages|tojson }}{{ {'b': '<é>', 'a': 1}|tojson(indent=2, sort_keys=true) }}",
    "namespace": "{% set n = namespace(i=0, self=2) %}{% for m in messages %}{% set n.i = 1 %}{% endfor %}{{ n.i }}",
    "dict": "{% set d = dict(a=1) %}{{ d.a }}{{ dict.fromkeys([1, 2])|length }}",
    "generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}a {{ x }}{% endgeneration %}{{ x }}",
    "macro": "{% macro one(m) %}[{{ m.role|upper }}:{{ m['content']|trim }}]{% endmacro %}{{ one(messages[0]) }}",
    "date": "{{ strftime_now('%Y') }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{% if add_generation_prompt %}>{% endif %}",
    "split": "{% set rest = messages[0].content.split('</think>')[-1].lstrip('\\n') %}{{ rest }}",
    "refusal": "{{ raise_exception('only users') }}",
    "broken": "{% for %}",
    "private": "{{ messages.__class__ }}",
    "private field": "{% set n = namespace(_x=1) %}",
    "changes a list": "{% set _ = messages.append(1) %}",
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  a <b>\n"}],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "é"},
        {"role": "assistant", "content": "x</think>\ny", "reasoning": "why", "name": None},
        {"role": "user", "content": "z", "tool_calls": [{"a": (1, 2.5, True)}], "odd": object},
    ],
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_transformers_renders_them(name: str, tmp_path: Path) -> None:
    saved(tiny_tokenizer(), tmp_path, template=TEMPLATES[name])
    plain, theirs = plain_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert plain is not None

    def outcome(tokenizer: Any, conversation: list[dict[str, Any]]) -> str:
        try:
            return str(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False))
        except Exception as error:
            return f"raises {type(error).__name__}" + (f": {error}" if name == "refusal" else "")

    for conversation in CONVERSATIONS:
        assert outcome(plain.inner, conversation) == outcome(theirs, conversation)


# --- what is left to transformers


def _without_file(name: str) -> Change:
    return lambda place: (place / name).unlink()


def _with(**changes: Any) -> Change:
    return lambda place: edit(place, **changes)


def _model(**config: Any) -> Change:
    return _writes("config.json", json.dumps({"model_type": "llama"} | config))


def _writes(name: str, text: str) -> Change:
    def change(place: Path) -> None:
        (place / name).write_text(text)

    return change


def _digits_apart(place: Path) -> None:
    """The file splits digits; the class that it names would not."""
    inner = byte_level()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    saved(PreTrainedTokenizerFast(tokenizer_object=inner, **CHAT_NAMES), place)
    edit(place, tokenizer_class="GPT2Tokenizer")


def _other_words(place: Path) -> None:
    """Another regular expression than Qwen2's class has."""
    inner = byte_level()
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,3}|\D+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    saved(PreTrainedTokenizerFast(tokenizer_object=inner, **CHAT_NAMES), place, "qwen2")


def _pads(place: Path) -> None:
    inner = byte_level()
    inner.enable_padding(pad_token="<|endoftext|>")
    saved(PreTrainedTokenizerFast(tokenizer_object=inner, **CHAT_NAMES), place)


def _several_templates(place: Path) -> None:
    (place / "additional_chat_templates").mkdir()
    (place / "additional_chat_templates" / "tool_use.jinja").write_text("x")


LEFT: dict[str, Change] = {
    "no tokenizer.json": _without_file("tokenizer.json"),
    "no tokenizer_config.json": _without_file("tokenizer_config.json"),
    "no config.json": _without_file("config.json"),
    "broken tokenizer.json": _writes("tokenizer.json", "{}"),
    "tekken.json": _writes("tekken.json", "{}"),
    "custom code": _with(auto_map={"AutoTokenizer": ["a.B", None]}),
    "custom code of the model": _model(auto_map={"AutoConfig": "a.B"}),
    "unknown architecture": _model(model_type="t5"),
    "unknown class": _with(tokenizer_class="BertTokenizer"),
    "rebuilt class": _with(tokenizer_class="GemmaTokenizer"),
    "no class": _with(tokenizer_class=None),
    "split special tokens": _with(split_special_tokens=True),
    "unknown setting": _with(fix_mistral_regex=True),
    "a special token to be added": _with(cls_token="<|cls|>"),
    "another extra token": _with(extra_special_tokens=["<|new|>"]),
    "added tokens with other flags": _with(added_tokens_decoder={"2": {"content": "<|im_end|>", "lstrip": True}}),
    "digits apart": _digits_apart,
    "other words": _other_words,
    "padding": _pads,
    "several templates": _several_templates,
}


@pytest.mark.parametrize("name", LEFT)
def test_what_only_transformers_reads_exactly_is_left_to_it(name: str, tmp_path: Path) -> None:
    _tiny(tmp_path)
    assert plain_tokenizer(tmp_path) is not None
    LEFT[name](tmp_path)
    assert plain_tokenizer(tmp_path) is None


def test_a_place_that_is_no_folder_is_left_to_transformers(tmp_path: Path) -> None:
    assert plain_tokenizer(tmp_path / "nothing") is None


def test_classes_are_those_that_transformers_chooses() -> None:
    """Fails when a newer transformers chooses another class for a type: then the tables here change too."""
    for kind, chosen in tokenizer_class.CLASS_OF_TYPE.items():
        assert tokenization_auto.TOKENIZER_MAPPING_NAMES.get(kind) == chosen, kind
    overruled = set(tokenizer_class.CLASS_OF_TYPE) & tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert overruled == tokenizer_class.OWN_CLASS_WINS


def test_reading_and_using_one_imports_neither_transformers_nor_torch(tmp_path: Path) -> None:
    _tiny(tmp_path)
    program = (
        "import sys; from pathlib import Path; from outpace.models.plain_tokenizer import plain_tokenizer\n"
        f"words = plain_tokenizer(Path({str(tmp_path)!r}))\n"
        "words.chat([{'role': 'user', 'content': 'x'}]), words.fingerprint, words.token_bytes(5)\n"
        "print([name for name in ('transformers', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- stop ids


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("eos", [{}, {"eos_token_id": None}, {"eos_token_id": [3, 5]}])
@pytest.mark.parametrize("generation", [None, {"eos_token_id": 9}])
def test_stop_ids_of_configurations_are_those_of_the_loaded_model(
    model_type: str, eos: dict[str, Any], generation: dict[str, Any] | None, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} | eos))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    words = HFTokenizer(tiny_tokenizer())
    loaded = AutoConfig.from_pretrained(tmp_path)
    expected = stop_ids_of([{"eos_token_id": loaded.eos_token_id}, generation or {}], words, 10**6)
    assert stop_ids_of(configurations(tmp_path), words, 10**6) == expected
