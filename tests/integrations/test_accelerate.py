"""outpace.accelerate: the ids that transformers itself generates, and refusals by name."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import outpace
from outpace.core.errors import BadInput
from outpace.integrations.transformers.ids_tokenizer import IdsTokenizer
from outpace.models.gguf_cache import converted
from outpace.models.source import resolve
from target_suite import ARCHITECTURES, tiny_model

PADDING = (0, 4, 6)
CASES: dict[str, dict[str, Any]] = {
    "the model's defaults": {},
    "a length": {"max_new_tokens": 24},
    "a length with the prompt": {"max_length": 20},
    "a repetition penalty": {"max_new_tokens": 24, "repetition_penalty": 1.3},
    "processors of its own": {"max_new_tokens": 24, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    "a shortest answer": {"max_new_tokens": 24, "min_new_tokens": 10},
    "a shortest row": {"max_new_tokens": 24, "min_length": 20},
    "many ends": {"max_new_tokens": 30, "eos_token_id": list(range(0, 90, 7)), "pad_token_id": 5},
    "no end": {"max_new_tokens": 24, "eos_token_id": None},
    "words that are banned": {"max_new_tokens": 20, "bad_words_ids": [[5], [7, 8]], "suppress_tokens": [9, 10]},
    "a beginning and an end": {"max_new_tokens": 20, "begin_suppress_tokens": [3, 4], "forced_eos_token_id": 2},
    "a bias": {"max_new_tokens": 20, "sequence_bias": {(10,): 3.0, (11, 12): 2.0}, "repetition_penalty": 1.4},
    "a decay": {"max_new_tokens": 20, "exponential_decay_length_penalty": (5, 1.5)},
    "a configuration": {"generation_config": hf.GenerationConfig(max_new_tokens=11, eos_token_id=17, pad_token_id=0)},
    "processors": {"logits_processor": hf.LogitsProcessorList([hf.MinNewTokensLengthLogitsProcessor(9, 5, 2)])},
    "allowed tokens": {
        "max_new_tokens": 12,
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(int(ids[-1]) % 7, 97, 3)),
    },
    "beams": {"max_new_tokens": 12, "num_beams": 3},
    "several of the beams": {
        "max_new_tokens": 16,
        "num_beams": 4,
        "num_return_sequences": 3,
        "eos_token_id": list(range(0, 90, 7)),
        "pad_token_id": 5,
        "length_penalty": 1.5,
    },
    "beams that end early": {"max_length": 24, "num_beams": 2, "early_stopping": True, "eos_token_id": [3, 9, 31, 50]},
    "beams and processors": {
        "max_new_tokens": 12,
        "num_beams": 3,
        "no_repeat_ngram_size": 2,
        "repetition_penalty": 1.2,
        "min_new_tokens": 6,
    },
    "what changes no token": {"max_new_tokens": 9, "use_cache": False, "num_beams": 1, "output_scores": False},
}


def inputs() -> dict[str, Any]:
    """Three rows, padded on the left."""
    ids = torch.randint(3, 97, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, padded in enumerate(PADDING):
        ids[row, :padded] = 0
        mask[row, :padded] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    model = tiny_model("llama")
    return model, outpace.accelerate(model, method="sam")


def check_same(model: Any, accelerated: Any, cases: Iterable[str]) -> None:
    for name in cases:
        found = accelerated.generate(**inputs(), **CASES[name])
        assert torch.equal(found, model.generate(**inputs(), **CASES[name])), name


@pytest.mark.filterwarnings("ignore")
def test_greedy_ids_are_those_of_transformers_with_every_setting(llama: tuple[Any, Any]) -> None:
    model, accelerated = llama
    check_same(model, accelerated, CASES)
    ids = inputs()["input_ids"]
    for given in ((ids[:1],), (ids,), ()):  # without a mask: taken from the padding; and without any input
        assert torch.equal(accelerated.generate(*given, max_new_tokens=5), model.generate(*given, max_new_tokens=5))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_ids_are_those_of_transformers_for_every_architecture(architecture: str) -> None:
    model = tiny_model(architecture)
    check_same(model, outpace.accelerate(model), ["a length", "many ends", "processors of its own"])


@pytest.mark.filterwarnings("ignore")
def test_the_models_own_defaults_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2")
    accelerated = outpace.accelerate(model, method="pld")
    model.generation_config.update(max_new_tokens=7, repetition_penalty=1.5, eos_token_id=[40, 41], pad_token_id=3)
    assert torch.equal(accelerated.generate(**inputs()), model.generate(**inputs()))
    assert accelerated.generate(**inputs(), max_new_tokens=2).shape == (3, 11)
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=1)
    assert torch.equal(accelerated.generate(**inputs()), model.generate(**inputs())), "top-k 1 samples the likeliest"


def test_sampling_repeats_by_torchs_seed_and_has_the_models_distribution(llama: tuple[Any, Any]) -> None:
    model, accelerated = llama
    one: dict[str, Any] = {"input_ids": torch.tensor([[5, 6, 7]])}

    def draw(seed: int, count: int = 3, most: int = 6) -> Tensor:
        torch.manual_seed(seed)
        found: Tensor = accelerated.generate(
            **one, do_sample=True, num_return_sequences=count, max_new_tokens=most, top_k=0
        )
        return found

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    first = draw(3, 200, 1)[:, 3]
    expected = model(**one).logits[0, -1].detach().softmax(-1)
    drawn = torch.bincount(first, minlength=97) / 200
    assert float((drawn - expected).abs().max()) < 0.15


def test_a_streamer_is_given_the_prompt_and_every_token(llama: tuple[Any, Any]) -> None:
    _, accelerated = llama
    seen: list[list[int]] = []

    class Listening:
        def put(self, value: Tensor) -> None:
            seen.append(value.flatten().tolist())

        def end(self) -> None:
            seen.append([])

    ids = inputs()["input_ids"][:1]
    found = accelerated.generate(ids, streamer=Listening(), max_new_tokens=8)
    assert seen[0] == ids[0].tolist()
    assert seen[1:-1] == [[token] for token in found[0, 9:].tolist()]
    assert seen[-1] == []
    with pytest.raises(BadInput, match="streamer takes one row, and there are 3"):
        accelerated.generate(**inputs(), streamer=Listening())


def test_rows_that_have_fewer_beams_than_asked_for_are_refused(llama: tuple[Any, Any]) -> None:
    _, accelerated = llama
    given = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 4}
    with pytest.raises(BadInput, match="row 0 has 1 beams, fewer than num_return_sequences=3"):
        accelerated.generate(
            **inputs(), **given, prefix_allowed_tokens_fn=lambda row, ids: [5] if row == 0 else list(range(60))
        )


@pytest.mark.filterwarnings("ignore")
def test_beams_have_the_scores_of_transformers(llama: tuple[Any, Any]) -> None:
    model, accelerated = llama
    given = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 9, "return_dict_in_generate": True}
    found = accelerated.generate(**inputs(), **given)
    theirs = model.generate(**inputs(), **given, output_scores=True)
    assert torch.equal(found.sequences, theirs.sequences)
    assert torch.allclose(found.sequences_scores, theirs.sequences_scores, atol=2e-4)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups=2: groups of beams are not built"),
    ({"num_beams": 2, "do_sample": True}, "do_sample with num_beams=2: its sampled beams are another distribution"),
    ({"num_beams": 2, "renormalize_logits": True}, "renormalize_logits with num_beams=2"),
    ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences=3 is more than num_beams=2"),
    ({"num_beams": 2, "length_penalty": "a"}, "length_penalty must be a number"),
    ({"num_beams": "a"}, "num_beams must be a whole number"),
    ({"num_beams": 2, "streamer": object()}, "streamer takes tokens as they come"),
    ({"assistant_model": object()}, "assistant_model: give outpace.accelerate a draft_model"),
    ({"stopping_criteria": [1]}, "stopping_criteria"),
    ({"custom_generate": "a/b"}, "custom_generate"),
    ({"penalty_alpha": 0.5}, "penalty_alpha=0.5"),
    ({"constraints": [1]}, "constraints"),
    ({"output_scores": True}, "output_scores=True"),
    ({"output_hidden_states": True}, "output_hidden_states=True"),
    ({"max_time": 3.0}, "max_time=3.0"),
    ({"typical_p": 0.5}, "typical_p=0.5"),
    ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    ({"watermarking_config": {"a": 1}}, "watermarking_config"),
    ({"token_healing": True}, "token_healing=True"),
    ({"past_key_values": (1,)}, "past_key_values"),
    ({"inputs_embeds": torch.ones(1, 2, 3)}, "inputs_embeds"),
    ({"position_ids": torch.ones(1, 2)}, "position_ids"),
    ({"nonsense": 1}, "nonsense"),
    ({"num_return_sequences": 2}, "num_return_sequences=2 needs do_sample=True, or num_beams"),
    ({"do_sample": True, "temperature": 0}, "temperature=0 does not sample"),
    ({"do_sample": True, "temperature": "hot"}, "temperature must be a number"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ({"max_new_tokens": "a"}, "max_new_tokens must be a whole number"),
    ({"max_length": 9}, "max_length=9 leaves no room behind 9 input ids"),
    ({"eos_token_id": "a"}, "eos_token_id must be a token id"),
    ({"stop_strings": ["a"]}, "stop_strings need the tokenizer"),
    ({"generation_config": {}}, "generation_config must be"),
    ({"logits_processor": [3]}, r"processors\[0\] must be"),
    ({"attention_mask": torch.ones(1, 3)}, "attention_mask must be a tensor of the shape"),
    ({"attention_mask": torch.tensor([[1] * 8 + [0]] * 3)}, "padding must be on the left"),
    ({"attention_mask": torch.tensor([[1, 0] + [1] * 7] * 3)}, "padding must be on the left"),
    ({"attention_mask": torch.zeros(3, 9)}, "no prompt empty"),
    ({"input_ids": [[1, 2]]}, "input_ids must be a tensor"),
    ({"input_ids": torch.ones(3)}, "input_ids must be whole numbers"),
    ({"inputs": torch.ones(1, 2)}, "inputs and input_ids are the same"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_it_cannot_honour_it_refuses_by_name(llama: tuple[Any, Any], options: dict[str, Any], said: str) -> None:
    _, accelerated = llama
    with pytest.raises(BadInput, match=said) as refused:
        accelerated.generate(**{**inputs(), **options})
    assert "\n" not in str(refused.value)


def test_everything_else_is_the_models_own(llama: tuple[Any, Any]) -> None:
    model, accelerated = llama
    assert isinstance(accelerated, hf.PreTrainedModel)
    assert accelerated.config is model.config
    assert torch.equal(accelerated(**inputs()).logits, model(**inputs()).logits)
    assert accelerated.eval() is accelerated
    assert accelerated.to("cpu") is accelerated.to(torch.float32) is accelerated
    with pytest.raises(BadInput, match="stays where it is"):
        accelerated.to("meta")
    accelerated.custom = 5
    assert model.custom == 5
    assert {"generate", "config", "forward"} <= set(dir(accelerated))
    assert repr(accelerated) == "AcceleratedModel(LlamaForCausalLM, method='sam')"
    found = accelerated.generate(**inputs(), max_new_tokens=3, return_dict_in_generate=True)
    assert torch.equal(found.sequences, accelerated.generate(**inputs(), max_new_tokens=3))


def test_load_takes_a_model_and_its_tokenizer_or_says_what_it_needs(llama: tuple[Any, Any]) -> None:
    model, _ = llama
    for given, said in (
        ((3,), "not int 3"),
        ((None,), "not None"),
        ((model,), "needs its tokenizer beside it"),
        ((model, 5), "tokenizer must be"),
    ):
        with pytest.raises(BadInput, match=said):
            outpace.load(*given)
    with pytest.raises(BadInput, match="dtype cannot be chosen for a model that is loaded already"):
        outpace.load(model, IdsTokenizer(model), dtype="int8")


@pytest.fixture(scope="module")
def real() -> tuple[Any, Any, Any]:
    """The embedded model in transformers, its tokenizer, and the same accelerated."""
    folder = converted(resolve("smollm2").path, torch.float32)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer, outpace.accelerate(model, tokenizer)


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_with_stop_strings_a_streamer_and_a_pipeline(real: tuple[Any, Any, Any]) -> None:
    model, tokenizer, accelerated = real
    batch = tokenizer(["The sea is", "def fib(n):\n    if n"], padding=True, return_tensors="pt")
    assert torch.equal(accelerated.generate(**batch, max_new_tokens=16), model.generate(**batch, max_new_tokens=16))
    one = tokenizer("The sea is", return_tensors="pt")
    for stop in ("the wor", [" of", "a long text"]):
        options = {"max_new_tokens": 24, "stop_strings": stop, "tokenizer": tokenizer}
        assert torch.equal(accelerated.generate(**one, **options), model.generate(**one, **options))
    streamer = hf.TextIteratorStreamer(tokenizer, skip_prompt=True)
    asked = {**one, "streamer": streamer, "max_new_tokens": 8}
    thread = threading.Thread(target=accelerated.generate, kwargs=asked)
    thread.start()
    text = "".join(streamer)
    thread.join()
    whole = accelerated.generate(**one, max_new_tokens=8)[0]
    assert text == tokenizer.decode(whole[one["input_ids"].shape[1] :])
    pipe = hf.pipeline("text-generation", model=accelerated, tokenizer=tokenizer)
    assert pipe("The sea is", max_new_tokens=8, do_sample=False)[0]["generated_text"].endswith(text)
    loaded = outpace.load(model, tokenizer)
    assert loaded.generate("The sea is", raw=True, max_new_tokens=8).text == text
