"""Heads in other engines' layouts: written, read back, and run by what those engines would make of the files."""

from __future__ import annotations

import errno
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import outpace.heads.layouts.files
from eagle_support import Written, true_states
from layouts_support import (
    ABOUT,
    IDLE,
    configuration,
    dflash_elsewhere,
    eagle3_elsewhere,
    eagle_elsewhere,
    edit,
    head_of,
    target,
    tensors,
    written,
)
from outpace.core.errors import BadInput
from outpace.heads.head_folder import open_head
from outpace.heads.layouts.base import About
from outpace.heads.layouts.registry import write
from outpace.methods.named_weights import bindings

TOKENS, DRAFTED = [5, 60, 7, 91, 33], [72, 48, 80]
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("eagle3", "speculators", {}),
    ("eagle3", "speculators", {"norms": "attdrift"}),
    ("eagle3", "speculators", {"residual": "normed"}),
    ("eagle3", "eagle", {}),
    ("eagle3", "eagle", {"norms": "attdrift"}),
    ("eagle", "eagle", {}),
    ("eagle", "eagle", {"bias": True}),
    ("dflash", "speculators", {}),
    ("dflash", "speculators", {"causal": True, "block": 5, "layers": 1}),
    ("medusa", "medusa", {"layers": 2, "heads": 3}),
    ("draft-lm", "hf", {"layers": 2}),
]


def shown(head: Any, logits: Tensor) -> Tensor:
    """Logits over a head's words as logits over the target's tokens."""
    found = logits.new_full((len(logits), target().vocab_size), float("-inf"))
    found[:, head.draft_vocabulary.d2t] = logits
    return found


def close(theirs: Tensor, ours: Tensor) -> bool:
    """The same up to the order of sums: embedding and LM head, which are not bfloat16 in the target, were rounded."""
    return bool((theirs.isinf() == ours.isinf()).all()) and torch.allclose(theirs, ours, rtol=0.02, atol=0.05)


@pytest.mark.parametrize(("kind", "layout", "options"), CASES)
@pytest.mark.parametrize("vocabulary", [50, 97])
def test_what_is_written_is_read_bit_for_bit(
    kind: str, layout: str, options: dict[str, Any], vocabulary: int, tmp_path: Path
) -> None:
    head = head_of(kind, vocabulary, **options)
    folder = written(head, layout, tmp_path / "there")
    again = open_head(folder).load(target())
    before, after = head.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert (again.kind, again.config.aux_hidden_state_layers, again.draft_vocabulary.own) == (
        kind,
        head.config.aux_hidden_state_layers,
        False,
    )
    for name, value in options.items():
        assert getattr(again.options, name) == value
    found = open_head(folder)
    assert (found.layout.name, found.kind, found.own) == (layout, kind, False)


@pytest.mark.parametrize(("layout", "options"), [case[1:] for case in CASES if case[0] == "eagle3"])
@pytest.mark.parametrize("vocabulary", [50, 97])
def test_another_engine_makes_the_same_of_an_eagle3_head(
    layout: str, options: dict[str, Any], vocabulary: int, tmp_path: Path
) -> None:
    head = head_of("eagle3", vocabulary, **options)
    states = true_states(target(), TOKENS[:-1], head.config.aux_hidden_state_layers)
    wanted = Written(head, target())
    ours = wanted.rows(TOKENS, wanted.fused(states), DRAFTED)
    theirs = eagle3_elsewhere(written(head, layout, tmp_path / "there"), TOKENS, states, DRAFTED)
    assert close(theirs, shown(head, ours))


def test_another_engine_makes_the_same_of_an_eagle_head(tmp_path: Path) -> None:
    head = head_of("eagle", 97)
    states = true_states(target(), TOKENS[:-1], head.config.aux_hidden_state_layers)
    wanted = Written(head, target())
    features = wanted.fused(states)
    rows = target().lm_head_rows(torch.arange(97))
    theirs = eagle_elsewhere(written(head, "eagle", tmp_path / "there"), rows, TOKENS, features, DRAFTED)
    assert close(theirs, wanted.rows(TOKENS, features, DRAFTED))


@pytest.mark.parametrize("options", [{}, {"causal": True}])
@pytest.mark.parametrize("vocabulary", [50, 97])
def test_another_engine_makes_the_same_of_a_dflash_head(
    options: dict[str, Any], vocabulary: int, tmp_path: Path
) -> None:
    head = head_of("dflash", vocabulary, **options)
    states = true_states(target(), TOKENS[:-1], head.config.aux_hidden_state_layers)
    context = head.context([states[tap] for tap in head.config.aux_hidden_state_layers])[None]
    context = torch.cat([context, torch.zeros_like(context[:, :1])], 1)  # the last token's own state is hidden
    embedded = target().embed(torch.tensor(TOKENS[-1:]))[None]
    ours = head.draft_vocabulary(head.blocks(context, embedded, torch.tensor([[len(TOKENS) - 1]]))[0, 0, 1:])
    theirs = dflash_elsewhere(written(head, "speculators", tmp_path / "there"), TOKENS[-1], states)
    assert close(theirs, shown(head, ours))


def test_medusa_makes_the_same_of_its_files(tmp_path: Path) -> None:
    head = head_of("medusa", 50, layers=2, heads=3)
    weights = tensors(written(head, "medusa", tmp_path / "there"))
    states = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    ours = head.draft_vocabulary(head.predicted(states))
    for index in range(3):
        row = states
        for layer in range(2):
            inner = row @ weights[f"{index}.{layer}.linear.weight"].T + weights[f"{index}.{layer}.linear.bias"]
            row = row + torch.nn.functional.silu(inner)
        logits = row @ weights[f"{index}.2.weight"].T
        assert logits.shape == (6, 97)
        assert close(logits[:, head.draft_vocabulary.d2t], ours[:, index])
        assert set(logits.argmax(-1).tolist()) <= set(head.draft_vocabulary.d2t.tolist())


@pytest.mark.parametrize("vocabulary", [50, 97])
def test_transformers_makes_the_same_of_a_draft_lm(vocabulary: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    head = head_of("draft-lm", vocabulary)
    folder = written(head, "hf", tmp_path / "there")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.tensor([TOKENS])
    with torch.inference_mode():
        theirs, (states, _) = model(prompt).logits[0], head(target().embed(prompt[0])[None])
        again = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    words = head.draft_vocabulary.d2t
    assert close(theirs[:, words], head.draft_vocabulary(states[0]))
    assert set(theirs.argmax(-1).tolist()) <= set(words.tolist())
    assert set(again[0, len(TOKENS) :].tolist()) <= set(words.tolist())


def test_a_vocabulary_map_holds_offsets_and_the_embedding_is_the_targets(tmp_path: Path) -> None:
    head = head_of("eagle3", 50)
    found = tensors(written(head, "speculators", tmp_path / "there"))
    assert torch.equal(found["d2t"] + torch.arange(50), head.draft_vocabulary.d2t)
    assert torch.equal(found["t2d"].nonzero()[:, 0], head.draft_vocabulary.d2t)
    assert (found["d2t"].dtype, found["t2d"].dtype) == (torch.int64, torch.bool)
    tokens = torch.arange(97)
    assert torch.equal(found["embed_tokens.weight"], target().embed(tokens).bfloat16().float())
    assert torch.equal(found["lm_head.weight"], target().lm_head_rows(head.draft_vocabulary.d2t).bfloat16().float())
    assert "d2t" not in tensors(written(head_of("eagle3", 97), "speculators", tmp_path / "whole"))


def test_a_norm_before_the_residual_stream_is_the_default_of_speculators(tmp_path: Path) -> None:
    folder = written(head_of("eagle3", 50, residual="normed"), "speculators", tmp_path / "there")
    found = configuration(folder)
    assert found.pop("norm_before_residual") is True
    (folder / "config.json").write_text(json.dumps(found))
    assert open_head(folder).load(target()).options.residual == "normed"


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_flat_configuration_says_of_norms_is_read_wherever_it_stands(nested: bool, tmp_path: Path) -> None:
    """The tensors are the same either way, so that nothing else would notice."""
    folder = written(head_of("eagle3", 50), "eagle", tmp_path / "there")
    assert open_head(folder).load(target()).options.residual == "state"
    inside = configuration(folder)["eagle_config"]
    flag = {"norm_before_residual": True}
    edit(folder, {"eagle_config": {**inside, **flag}} if nested else flag)
    assert open_head(folder).load(target()).options.residual == "normed"
    edit(folder, {"eagle_config": {**inside, "norm_before_fc": True}})
    with pytest.raises(BadInput, match="norm_before_fc"):
        open_head(folder).load(target())


@pytest.mark.parametrize("held", [{"tokens": [1, 2]}, "tokens", [0.5, 1.5], torch.rand(9)])
def test_a_map_that_is_no_list_of_tokens_is_refused(held: Any, tmp_path: Path) -> None:
    folder = written(head_of("eagle", 50), "eagle", tmp_path / "there")
    torch.save(held, folder / "token_map.pt")
    with pytest.raises(BadInput, match=r"token_map\.pt that is no list of tokens"):
        open_head(folder).load(target())


def test_the_configuration_of_speculators_says_everything(tmp_path: Path) -> None:
    found = configuration(written(head_of("eagle3", 50, norms="attdrift"), "speculators", tmp_path / "eagle3"))
    assert found["speculators_model_type"] == found["speculators_config"]["algorithm"] == "eagle3"
    assert found["speculators_config"]["verifier"] == {
        "name_or_path": "models/tiny",
        "architectures": ["LlamaForCausalLM"],
    }
    assert found["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
    assert found["draft_vocab_size"] == 50
    assert found["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert found["norm_before_residual"] is False
    assert found["fc_norm"] is found["norm_output"] is True
    assert found["transformer_layer_config"]["vocab_size"] == 97
    block = configuration(written(head_of("dflash", block=6), "speculators", tmp_path / "dflash"))
    assert block["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert (block["block_size"], block["mask_token_id"]) == (6, IDLE)
    assert block["aux_hidden_state_layer_ids"] == [1, 2]
    assert block["sliding_window_non_causal"] is True  # vLLM asks this of full attention, too
    causal = configuration(written(head_of("dflash", causal=True), "speculators", tmp_path / "causal"))
    assert causal["sliding_window_non_causal"] is False
    beside = torch.load(tmp_path / "dflash" / "mask_embedding.pt", weights_only=True)
    assert beside["mask_token_id"] == IDLE
    assert torch.equal(beside["embedding"].float(), tensors(tmp_path / "dflash")["embed_tokens.weight"][IDLE])


def test_engines_collect_states_in_the_order_of_the_layers(tmp_path: Path) -> None:
    head = head_of("eagle3", aux_hidden_state_layers=(2, 0), norms="attdrift")
    folder = written(head, "speculators", tmp_path / "there")
    assert configuration(folder)["eagle_aux_hidden_state_layer_ids"] == [0, 2]
    states = true_states(target(), TOKENS, (0, 2))
    again: Any = open_head(folder).load(target())
    assert again.config.aux_hidden_state_layers == (0, 2)
    assert torch.allclose(again.fused([states[0], states[2]]), head.fused([states[2], states[0]]), atol=1e-4)


def test_speculators_says_nothing_of_layers_that_are_the_usual_ones(tmp_path: Path) -> None:
    folder = written(head_of("eagle3", 50), "speculators", tmp_path / "there")
    edit(folder, {"eagle_aux_hidden_state_layer_ids": None})
    assert open_head(folder).load(target()).config.aux_hidden_state_layers == (1, 2)


def test_sglang_names_the_layers_whose_output_it_is(tmp_path: Path) -> None:
    head = head_of("eagle3", aux_hidden_state_layers=(2, 4))
    folder = written(head, "eagle", tmp_path / "there")
    key = "eagle_aux_hidden_state_layer_ids"
    assert configuration(folder)[key] == [2, 4]
    assert configuration(folder)["eagle_config"][key] == [1, 3]
    edit(folder, {key: None})
    assert open_head(folder).load(target()).config.aux_hidden_state_layers == (2, 4)
    edit(folder, {"eagle_config": None})
    assert open_head(folder).load(target()).config.aux_hidden_state_layers == (1, 2)  # EAGLE's own


def test_the_configuration_of_eagle_is_what_sglang_and_specforge_read(tmp_path: Path) -> None:
    found = configuration(written(head_of("eagle3", 50, norms="attdrift"), "eagle", tmp_path / "drift"))
    assert found["architectures"] == ["LlamaForCausalLMEagle3"]
    assert found["fc_norm"] is found["norm_output"] is True
    assert (found["draft_vocab_size"], found["num_hidden_layers"], found["tie_word_embeddings"]) == (50, 1, False)
    assert {f"fc_norm.{index}.weight" for index in range(2)} < tensors(tmp_path / "drift").keys()
    plain = configuration(written(head_of("eagle3", 50, norms="eagle3"), "eagle", tmp_path / "plain"))
    assert plain["fc_norm"] is plain["norm_output"] is False
    edit(tmp_path / "drift", {"norm_output": None})
    with pytest.raises(BadInput, match="one of fc_norm and norm_output"):
        open_head(tmp_path / "drift").load(target())


def test_engines_do_not_take_the_bias_of_an_eagle_head_for_one_of_attention(tmp_path: Path) -> None:
    for bias in (False, True):
        folder = written(head_of("eagle", bias=bias), "eagle", tmp_path / str(bias))
        assert "bias" not in configuration(folder)
        assert ("fc.bias" in tensors(folder)) is bias
        # vLLM takes the one without a bias, SGLang the one with.
        assert configuration(folder)["architectures"] == ["LlamaForCausalLMEagle" if bias else "LlamaForCausalLM"]


@pytest.mark.parametrize(("kind", "layout"), [("eagle3", "speculators"), ("eagle3", "eagle"), ("draft-lm", "hf")])
def test_a_low_rank_lm_head_is_multiplied_out(kind: str, layout: str, tmp_path: Path) -> None:
    head = head_of(kind, 50, rank=4)
    again = open_head(written(head, layout, tmp_path / "there")).load(target())
    assert again.draft_vocabulary.own
    assert torch.equal(again.draft_vocabulary.matrix, head.draft_vocabulary.matrix.bfloat16().float())
    assert torch.equal(again.draft_vocabulary.d2t, head.draft_vocabulary.d2t)


def test_what_a_layout_cannot_say_is_refused(tmp_path: Path) -> None:
    def refused(head: Any, layout: str, *said: str) -> None:
        with pytest.raises(BadInput) as caught:
            write(head, target(), tmp_path / "there", layout, ABOUT)
        assert all(one in str(caught.value) for one in said), caught.value
        assert not list(tmp_path.iterdir())

    refused(head_of("eagle3", residual="normed"), "eagle", "residual", "speculators")
    refused(head_of("eagle", rank=4), "eagle", "LM head of its own")
    refused(head_of("bpd"), "medusa", "no heads of kind 'bpd'", "no layout of other engines")
    refused(head_of("eagle3"), "medusa", "it is written as: eagle, speculators")
    refused(head_of("eagle3"), "gguf", "unknown layout 'gguf'", "eagle, hf, medusa, speculators")
    refused(head_of("dflash"), "z-lab", "unknown layout")
    with pytest.raises(BadInput, match="uses all of its tokens"):
        write(head_of("dflash", 97), target(), tmp_path / "there", "speculators", About("tiny"))


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match="not empty"):
        written(head_of("eagle3"), "speculators", taken)
    assert [path.name for path in taken.iterdir()] == ["notes.txt"]

    def full(found: dict[str, Tensor], path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(outpace.heads.layouts.files, "save_file", full)
    with pytest.raises(BadInput, match="No space left"):
        written(head_of("eagle3"), "speculators", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_weights_are_read_from_whatever_holds_them(tmp_path: Path) -> None:
    head = head_of("eagle3")
    folder = written(head, "speculators", tmp_path / "there")
    whole = load_file(folder / "model.safetensors")

    def same() -> bool:
        return torch.equal(open_head(folder).load(target()).state_dict()["fc.weight"], head.state_dict()["fc.weight"])

    names = sorted(whole)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    (folder / "model.safetensors").unlink()
    for file, some in halves.items():
        save_file({name: whole[name] for name in some}, folder / file)
    placed = {name: file for file, some in halves.items() for name in some}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    assert same()
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    with pytest.raises(BadInput, match=r"b\.safetensors is missing"):
        open_head(folder).load(target())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "../model.safetensors")}))
    with pytest.raises(BadInput, match="outside its folder"):
        open_head(folder).load(target())
    for path in (index, folder / "a.safetensors", folder / "c.safetensors"):
        path.unlink()
    torch.save(whole, folder / "pytorch_model.bin")
    assert same()
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(BadInput, match="no weights"):
        open_head(folder).load(target())


class Bomb:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


def test_a_pickle_that_would_run_code_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = written(head_of("medusa"), "medusa", tmp_path / "there")
    (folder / "medusa_lm_head.safetensors").unlink()
    path = folder / "medusa_lm_head.pt"
    torch.save({"0.0.linear.weight": Bomb()}, path)
    with pytest.raises(BadInput, match="more than weights"):
        open_head(folder).load(target())
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(BadInput, match="more than weights"):
        open_head(folder).load(target())
    assert not (tmp_path / "ran").exists()
    path.write_bytes(b"PK")
    with pytest.raises(BadInput, match="damaged"):
        open_head(folder).load(target())


def ones_more(value: Tensor) -> Tensor:
    return torch.cat([value, value[:1]])


WRONG: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    ("eagle3", "speculators", {"transformer_layer_config__hidden_size": 64}, {}, "its hidden size is 64.*model's 32"),
    ("eagle3", "speculators", {"transformer_layer_config__vocab_size": 99}, {}, "its vocabulary is 99, .*model's 97"),
    ("eagle3", "speculators", {"eagle_aux_hidden_state_layer_ids": [1, 9]}, {}, "reads layer 9; .*has 4 layers"),
    ("dflash", "speculators", {"aux_hidden_state_layer_ids": None}, {}, "does not say which layers"),
    ("eagle3", "speculators", {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, {}, "fc.weight of shape"),
    ("eagle3", "speculators", {"norm_before_fc": True}, {}, "norm_before_fc"),
    ("eagle3", "speculators", {"fc_norm": True}, {}, "one of fc_norm and norm_output"),
    ("eagle3", "speculators", {"transformer_layer_config__num_hidden_layers": 2}, {}, "has 2 layers"),
    ("eagle3", "speculators", {"transformer_layer_config__hidden_act": "gelu"}, {}, "activation gelu"),
    ("eagle3", "speculators", {"transformer_layer_config__head_dim": 7}, {}, "q_proj.weight of shape"),
    ("eagle3", "speculators", {"draft_vocab_size": 7}, {}, "its configuration says 7"),
    ("eagle3", "speculators", {"transformer_layer_config": None}, {}, "no transformer_layer_config"),
    ("eagle3", "speculators", {}, {"fc__weight": lambda one: None}, "lacks tensor fc.weight"),
    ("eagle3", "speculators", {}, {"extra": lambda one: one}, "does not have: extra"),
    ("eagle3", "speculators", {}, {"norm__weight": lambda one: one * float("nan")}, "norm.weight .*not finite"),
    ("eagle3", "speculators", {}, {"d2t": lambda one: one + torch.arange(50)}, "token ids in d2t"),
    ("eagle3", "speculators", {}, {"d2t": lambda one: one + 1}, "drafts tokens that this model does not have"),
    ("eagle3", "speculators", {}, {"d2t": lambda one: one - 1}, "d2t and t2d name different tokens"),
    ("eagle3", "speculators", {}, {"d2t": lambda one: one - torch.arange(50)}, "two draft tokens"),
    ("eagle3", "speculators", {}, {"lm_head__weight": ones_more}, r"lm_head.weight of shape \(51, 32\)"),
    ("eagle3", "speculators", {}, {"embed_tokens__weight": ones_more}, r"embed_tokens of shape \(98, 32\)"),
    ("eagle3", "speculators", {}, {"embed_tokens__weight": lambda one: one.flip(0)}, "other weights than this model's"),
    ("eagle3", "eagle", {"num_hidden_layers": 2}, {}, "has 2 layers"),
    ("eagle", "eagle", {}, {"embed_tokens__weight": lambda one: one.flip(0)}, "other weights than this model's"),
    ("eagle", "eagle", {}, {"layers__0__input_layernorm__weight": lambda one: one}, "does not have: layers.0.input"),
    ("dflash", "speculators", {"mask_token_id": 500}, {}, "no mask token"),
    ("dflash", "speculators", {"sample_from_anchor": True}, {}, "sample_from_anchor"),
    ("dflash", "speculators", {"block_size": 100}, {}, "beyond what a dflash head can be: block"),
    ("medusa", "medusa", {"hidden_size": 64}, {}, "its hidden size is 64"),
    ("medusa", "medusa", {"medusa_num_heads": 5}, {}, "LM head of its own in each head|lacks tensor 4.0"),
    ("medusa", "medusa", {}, {"1__1__weight": lambda one: one + 1}, "LM head of its own in each head"),
    ("medusa", "medusa", {}, {"token_map": lambda one: one + 10}, "drafts tokens that this model does not have"),
    ("medusa", "medusa", {}, {"token_map": lambda one: one.float()}, "token_map that is no list of tokens"),
    ("dflash", "speculators", {"transformer_layer_config__layer_types": [["full_attention"]]}, {}, "a window of the"),
    (
        "medusa",
        "medusa",
        {},
        {f"{index}__1__weight": lambda one: one.roll(1, 1) for index in range(4)},
        "made for other weights than this model's: its LM head",
    ),
    ("draft-lm", "hf", {"hidden_size": 64}, {}, "its hidden size is 64.*--draft-model"),
]


@pytest.mark.parametrize(("kind", "layout", "config", "changed", "said"), WRONG)
def test_what_does_not_fit_is_named(
    kind: str, layout: str, config: dict[str, Any], changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = written(head_of(kind), layout, tmp_path / "there")
    edit(folder, config, **changed)
    with pytest.raises(BadInput, match=said) as caught:
        open_head(folder).load(target())
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = written(head_of("eagle3"), "speculators", tmp_path / "there")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(BadInput, match="damaged or cut short"):
        open_head(folder).load(target())


def test_an_lm_head_of_its_own_stays_its_own(tmp_path: Path) -> None:
    folder = written(head_of("eagle3"), "speculators", tmp_path / "there")
    edit(folder, None, lm_head__weight=lambda one: one * 1.5)
    again = open_head(folder).load(target())
    assert again.draft_vocabulary.own
    assert torch.equal(again.draft_vocabulary.matrix, tensors(folder)["lm_head.weight"])


def test_medusa_as_vllm_converts_it(tmp_path: Path) -> None:
    head = head_of("medusa", 50)
    folder = written(head, "medusa", tmp_path / "there")
    assert configuration(folder)["medusa_fc_bias"] is configuration(folder)["original_lm_head"] is True
    found = load_file(folder / "medusa_lm_head.safetensors")
    theirs = {"token_map": found["token_map"], "lm_heads.0.weight": found["0.1.weight"]}
    for index in range(head.options.heads):
        theirs[f"blocks.{index}.layers.0.weight"] = found[f"{index}.0.linear.weight"]
        theirs[f"lm_heads.{index}.weight"] = found[f"{index}.1.weight"][found["token_map"]].clone()
    save_file(theirs, folder / "model.safetensors")
    sizes = {"model_type": "medusa", "num_heads": head.options.heads, "num_hidden_layers": 1, "hidden_size": 32}
    (folder / "config.json").write_text(json.dumps(sizes | {"vocab_size": 97, "truncated_vocab_size": 50}))
    again: Any = open_head(folder).load(target())
    for index in range(head.options.heads):
        ours = again.state_dict()[f"blocks.{index}.0.weight"]
        assert torch.equal(ours, head.state_dict()[f"blocks.{index}.0.weight"])
        assert not again.state_dict()[f"blocks.{index}.0.bias"].any()
    assert torch.equal(again.draft_vocabulary.d2t, head.draft_vocabulary.d2t)


def test_dflash_as_its_authors_publish_it(tmp_path: Path) -> None:
    head = head_of("dflash", 97, layers=1)
    folder = written(head, "speculators", tmp_path / "there")
    edit(folder, None, embed_tokens__weight=lambda one: None, lm_head__weight=lambda one: None)
    inner = configuration(folder)["transformer_layer_config"]
    (folder / "mask_embedding.pt").unlink()
    special = {"mask_token_id": 3, "target_layer_ids": [tap - 1 for tap in head.config.aux_hidden_state_layers]}
    theirs = inner | {"architectures": ["DFlashDraftModel"], "block_size": 8, "num_target_layers": 4}
    (folder / "config.json").write_text(json.dumps(theirs | {"dflash_config": special}))
    again: Any = open_head(folder).load(target())
    assert again.config.aux_hidden_state_layers == head.config.aux_hidden_state_layers
    assert torch.allclose(again.mask_embedding, target().embed(torch.tensor([3]))[0])
    assert torch.equal(again.fc.weight, head.fc.weight)
    torch.save({"mask_token_id": 3, "embedding": head.mask_embedding.data}, folder / "mask_embedding.pt")
    masked: Any = open_head(folder).load(target())
    assert torch.equal(masked.mask_embedding, head.mask_embedding)
    torch.save(torch.zeros(31), folder / "mask_embedding.pt")
    with pytest.raises(BadInput, match="no embedding of this model"):
        open_head(folder).load(target())
    edit(folder, {"num_target_layers": 6})
    with pytest.raises(BadInput, match="its number of layers is 6, this model's 4"):
        open_head(folder).load(target())


def test_a_named_head_may_be_of_any_layout(tmp_path: Path) -> None:
    head = head_of("eagle3")
    folder = written(head, "eagle", tmp_path / "there")
    named = bindings(target(), None, None, folder, "tiny")  # type: ignore[arg-type]
    found = named.need("eagle3", "eagle3")[0].load()
    assert torch.equal(found.state_dict()["fc.weight"], head.state_dict()["fc.weight"])
    with pytest.raises(BadInput, match="--head gave eagle3"):
        named.need("medusa", "medusa")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(BadInput, match="not the configuration of a head"):
        bindings(target(), None, None, tmp_path / "other", "tiny")  # type: ignore[arg-type]


def test_provenance_goes_along(tmp_path: Path) -> None:
    write(head_of("eagle3"), target(), tmp_path / "there", "eagle", About("tiny", provenance={"seed": 7}))
    assert json.loads((tmp_path / "there" / "training.json").read_text()) == {"seed": 7}


def test_a_medusa_head_brings_the_tree_of_its_measured_accuracies(tmp_path: Path) -> None:
    head = head_of("medusa", heads=2)
    assert "medusa_choices" not in configuration(written(head, "medusa", tmp_path / "unmeasured"))
    head.config = head.config.model_copy(update={"rank_accuracies": ((0.6, 0.2), (0.4, 0.3))})
    choices = configuration(written(head, "medusa", tmp_path / "measured"))["medusa_choices"]
    assert choices == [[0], [0, 0], [1], [0, 1], [1, 0], [1, 1]]
