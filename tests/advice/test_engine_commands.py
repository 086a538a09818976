"""What is printed to be pasted, for each engine; and what vLLM's metrics say of its steps."""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import replace

import pytest

from layouts_support import head_of, target
from outpace.advice.candidates import ENGINES, Shape, candidates
from outpace.advice.engine_commands import Offer, Typed, commands
from outpace.advice.vllm_rounds import counters, step_between
from outpace.certify.letters import LETTERS, Letters
from outpace.core.errors import OutpaceError
from outpace.methods.bindings import Bindings, draft_models, heads
from outpace.methods.registry import Context, build
from outpace.targets.bridged import BridgedTarget
from outpace.targets.table import TableTarget
from outpace.vocabulary.shared import VocabularyMap

CHAIN = Offer("pld", Shape({"num_draft_tokens": 4}, frozenset(ENGINES), 4), 1.2, 1.1)
OWN = Offer("auto", Shape(engines=frozenset({"outpace"})), 1.5, 1.4)
TREE = Offer(
    "eagle3",
    Shape({"mode": "tree", "max_nodes": 8, "depth": 4}, frozenset({"outpace", "sglang"})),
    1.4,
    1.3,
    head="heads/mine",
)
HEAD_CHAIN = Offer(
    "eagle3",
    Shape({"mode": "tree", "topk": 1, "max_nodes": 3, "depth": 3}, frozenset({"outpace", "sglang", "vllm"}), 3),
    1.3,
    1.2,
    head="heads/mine",
)


def vllm_config(command: str) -> dict[str, object]:
    words = shlex.split(command, comments=True)
    found: dict[str, object] = json.loads(words[words.index("--speculative-config") + 1])
    return found


def test_each_engine_gets_the_best_that_it_can_run() -> None:
    found = commands(Typed("model"), OWN, [CHAIN, OWN, TREE, HEAD_CHAIN])
    assert tuple(found) == ENGINES
    assert found["outpace"] == "outpace serve --model model --method auto"
    assert vllm_config(found["vllm"]) == {
        "method": "eagle3",
        "model": "HEAD_FOLDER",
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
    }
    assert "outpace export-head heads/mine --layout speculators" in found["vllm"]
    assert "outpace export-head heads/mine --layout eagle " in found["sglang"]
    words = shlex.split(found["sglang"], comments=True)
    assert words[words.index("--speculative-algorithm") + 1] == "EAGLE3"
    assert words[words.index("--speculative-num-steps") + 1] == "4"
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "9"
    assert found["llama.cpp"].startswith("# llama.cpp reads GGUF")


def test_lookup_and_draft_models() -> None:
    found = commands(Typed("org/model"), CHAIN, [CHAIN])
    assert found["outpace"].endswith("--method pld --param pld.num_draft_tokens=4")
    assert vllm_config(found["vllm"])["method"] == "ngram"
    assert vllm_config(found["vllm"])["num_speculative_tokens"] == 4
    assert found["llama.cpp"].startswith("# llama.cpp reads GGUF")
    draft = Offer("draft-model", Shape({"num_draft_tokens": 2}, chain=2), 1.3, 1.2)
    found = commands(Typed("big.gguf", draft_models={"small.gguf": "small.gguf"}), draft, [draft])
    assert "--draft-model small.gguf" in found["outpace"]
    assert "STANDALONE" in found["sglang"]
    words = shlex.split(found["llama.cpp"])
    options = dict(itertools.pairwise(words))
    assert options["--spec-type"] == "draft-simple" and options["-md"] == "small.gguf"
    assert options["--spec-draft-n-max"] == "2" and options["--spec-draft-p-min"] == "0"


def test_nothing_is_speculated_where_nothing_gains() -> None:
    found = commands(Typed("model.gguf"), None, [Offer("pld", CHAIN.shape, 1.3, 1.01)])
    assert found["outpace"].endswith("--method none")
    assert "--speculative-config" not in found["vllm"]
    assert "--speculative-algorithm" not in found["sglang"]
    assert "--spec-type" not in found["llama.cpp"]


def test_the_command_is_the_recommendation_where_the_method_s_own_choice_is_as_good() -> None:
    own = Offer("pld", Shape(engines=frozenset({"outpace"})), 1.2, 1.1)
    longer = replace(CHAIN, speedup=1.205)
    found = commands(Typed("model.gguf"), own, [own, longer])
    assert found["outpace"] == "outpace serve --model model.gguf --method pld"
    assert "--spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 4" in found["llama.cpp"]


@pytest.mark.parametrize(
    ("offer", "words"),
    [
        (CHAIN, "--method pld --num-draft-tokens 4"),
        (HEAD_CHAIN, "--head heads/mine --num-draft-tokens 3"),
        (
            Offer("draft-model", Shape({"num_draft_tokens": 2}, chain=2), 1.3, 1.2),
            "--method draft-model --draft-model small.gguf --num-draft-tokens 2",
        ),
    ],
)
def test_vllm_is_given_a_gguf_file_by_outpace_which_converts_it(offer: Offer, words: str) -> None:
    typed = Typed("model.gguf", draft_models={"small.gguf": "small.gguf"}, dtype="bfloat16")
    line = commands(typed, offer, [offer])["vllm"]
    assert line.startswith(f"outpace serve --engine vllm --model model.gguf --dtype bfloat16 {words}  # ")
    assert "--speculative-config" in line
    plain = commands(typed, None, [offer])["vllm"]
    assert plain.startswith("outpace serve --engine vllm --model model.gguf --dtype bfloat16  # without speculation")


def test_other_engines_are_told_the_precision_the_threads_and_the_batch() -> None:
    found = commands(Typed("model", dtype="bfloat16"), CHAIN, [CHAIN])
    assert found["vllm"].startswith("vllm serve model --dtype bfloat16 --speculative-config ")
    at_four = replace(CHAIN, batch=4)
    found = commands(Typed("model.gguf", threads=2), at_four, [at_four])
    assert found["llama.cpp"].startswith("llama-server -m model.gguf -t 2 -np 4 --spec-type ngram-simple ")
    short = replace(CHAIN, shape=Shape({"num_draft_tokens": 2}, frozenset(ENGINES), 2))
    assert "size-n 2 --spec-ngram-simple-size-m 2 " in commands(Typed("model.gguf"), short, [short])["llama.cpp"]


def test_commands_are_for_the_first_batch_at_which_the_recommendation_pays() -> None:
    losing, paying = replace(CHAIN, lower=0.98), replace(CHAIN, batch=16)
    found = commands(Typed("model.gguf"), paying, [losing, paying])
    assert "--method pld --param pld.num_draft_tokens=4  # for batch 16" in found["outpace"]
    assert "--method pld --num-draft-tokens 4" in found["vllm"]
    assert all("for batch 16" in line and "without speculation" not in line for line in found.values())
    # An engine that cannot run it there gets what gains at a larger batch.
    found = commands(Typed("model.gguf"), replace(OWN, batch=4), [losing, replace(OWN, batch=4), paying])
    assert "# for batch 4" in found["outpace"] and "# for batch 16" in found["llama.cpp"]


def test_every_line_is_of_the_best_offer_that_can_be_written() -> None:
    """SGLang cannot load a draft LM, nor llama.cpp a model that is no GGUF file; both can copy."""
    typed = Typed("model.gguf", draft_models={"draft-lm": "draft-lm"})
    draft = Offer("draft-model", Shape({"num_draft_tokens": 3}, chain=3), 1.4, 1.3)
    found = commands(typed, draft, [draft, CHAIN])
    assert "--speculative-algorithm NGRAM" in found["sglang"]
    assert "--spec-type ngram-simple" in found["llama.cpp"]
    assert "--head draft-lm --num-draft-tokens 3" in found["vllm"]


@pytest.mark.parametrize(
    ("kind", "label", "engines"),
    [
        ("eagle", "eagle", {"outpace", "sglang"}),
        ("eagle3", "eagle3", {"outpace", "sglang", "vllm"}),
        ("bpd", "bpd", {"outpace"}),
        ("dflash", "dflash", {"outpace", "vllm"}),
        ("medusa", "medusa", {"outpace", "vllm"}),
        ("draft-lm", "distill", {"outpace", "vllm"}),
    ],
)
@pytest.mark.parametrize("greedy", [True, False])
def test_a_head_is_offered_to_the_engines_that_draft_with_it(
    kind: str, label: str, engines: set[str], greedy: bool
) -> None:
    context = Context(target(), bindings=Bindings(heads({"mine": head_of(kind)})))
    for engine in ENGINES:
        offered, left_out = candidates(context, engine, greedy=greedy)
        found = [one for one in offered if one.head is not None]
        assert [one.method for one in found] == ([label] if engine in engines else [])
        assert left_out == ([] if engine in engines else [label])
        for shape in (shape for one in found for shape in one.shapes):
            build(label, context, shape.settings)
            offer = Offer(label, shape, 1.4, 1.3, head="heads/mine")
            assert not commands(Typed("model.gguf"), offer, [offer])[engine].startswith("#")
            if engine == "vllm":
                assert vllm_config(commands(Typed("model"), offer, [offer])["vllm"])["method"] != "draft-lm"


def test_two_heads_of_a_kind_are_two_candidates() -> None:
    context = Context(target(), bindings=Bindings(heads({"one": head_of("eagle3"), "two": head_of("eagle3")})))
    found = [one for one in candidates(context, "sglang", greedy=True).candidates if one.head is not None]
    assert [(one.method, one.head) for one in found] == [("eagle3#one", "one"), ("eagle3#two", "two")]
    offer = Offer("eagle3#two", found[1].shapes[0], 1.4, 1.3, head="heads/two")
    lines = commands(Typed("model", heads=["one=heads/one", "two=heads/two"]), offer, [offer])
    assert "--method 'eagle3#two' --head two=heads/two --param 'eagle3#two." in lines["outpace"]
    assert "export-head heads/two --layout eagle" in lines["sglang"]


def test_names_of_draft_models_stay_in_outpace() -> None:
    typed = Typed("big.gguf", draft_models={"half": "half.gguf", "small": "small.gguf"})
    draft = Offer("draft-model#small", Shape({"num_draft_tokens": 3}, chain=3), 1.4, 1.3)
    found = commands(typed, draft, [draft])
    assert found["outpace"] == (
        "outpace serve --model big.gguf --method 'draft-model#small' --draft-model small=small.gguf "
        "--param 'draft-model#small.num_draft_tokens=3'"
    )
    assert "--draft-model small.gguf --num-draft-tokens 3" in found["vllm"]
    assert "--speculative-draft-model-path small.gguf" in found["sglang"]
    assert "-md small.gguf" in found["llama.cpp"]
    router = Offer("aio", Shape(engines=frozenset({"outpace"})), 1.4, 1.3)
    assert commands(typed, router, [router])["outpace"].endswith(
        "--method aio --draft-model half=half.gguf --draft-model small=small.gguf"
    )


def test_an_embedded_draft_model_has_its_published_name_elsewhere() -> None:
    draft = Offer("draft-model", Shape({"num_draft_tokens": 3}, chain=3), 1.4, 1.3)
    found = commands(Typed("big", draft_models={"smollm2": "smollm2"}), draft, [draft])
    assert "--draft-model smollm2 " in found["outpace"]
    assert vllm_config(found["vllm"])["model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "--speculative-draft-model-path HuggingFaceTB/SmolLM2-135M-Instruct" in found["sglang"]


def test_a_draft_model_of_another_vocabulary_is_for_outpace_alone() -> None:
    letters = Letters(LETTERS[:12])
    other = BridgedTarget(TableTarget(12), VocabularyMap(letters, letters, 12, 12), 64)
    for draft, engines in ((other, ["outpace"]), (TableTarget(12), ["outpace", "vllm", "sglang"])):
        context = Context(TableTarget(12), bindings=Bindings(draft_models({"small": draft})))
        offered = [
            engine
            for engine in ENGINES
            if "draft-model" in {one.method for one in candidates(context, engine, greedy=True).candidates}
        ]
        assert offered == engines
    assert (
        "draft-model"
        in candidates(
            Context(TableTarget(12), bindings=Bindings(draft_models({"small": other}))), "vllm", greedy=True
        ).left_out
    )


def test_a_draft_lm_is_exported_for_vllm_and_refused_for_others() -> None:
    draft = Offer("draft-model", Shape({"num_draft_tokens": 3}, chain=3), 1.4, 1.3)
    found = commands(Typed("smollm2", draft_models={"draft-lm": "draft-lm"}), draft, [draft])
    assert "--draft-model draft-lm --param" in found["outpace"]
    assert vllm_config(found["vllm"])["model"] == "HEAD_FOLDER"
    assert "outpace export-head draft-lm --layout hf --model smollm2 --out HEAD_FOLDER" in found["vllm"]
    assert found["sglang"].startswith("# SGLang does not draft with the draft LM")


def test_outpace_s_command_names_the_options_of_the_machine() -> None:
    found = commands(Typed("model.gguf", machine=["--dtype", "bfloat16", "--threads", "2"]), CHAIN, [CHAIN])
    assert found["outpace"].startswith("outpace serve --model model.gguf --dtype bfloat16 --threads 2 --method pld")


METRICS = """# TYPE vllm:request_decode_time_seconds histogram
vllm:request_decode_time_seconds_sum{{engine="0",model_name="model"}} {seconds}
vllm:generation_tokens_total{{engine="0",model_name="model"}} {tokens}
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="model"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="model"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="model",position="0"}} 77
"""


def test_a_step_of_vllm_follows_from_its_counters() -> None:
    before = counters(METRICS.format(seconds=1.0, tokens=100, drafted=10, accepted=5))
    after = counters(METRICS.format(seconds=3.0, tokens=164, drafted=90, accepted=27))
    # 64 tokens of 2 requests: 62 after the first ones, 22 of them accepted, in 40 steps.
    found = step_between(before, after, 2)
    assert found.seconds == pytest.approx(2.0 / 40)
    assert found.draft_tokens == pytest.approx(2.0)
    with pytest.raises(OutpaceError, match="did not count"):
        step_between(before, before, 2)
