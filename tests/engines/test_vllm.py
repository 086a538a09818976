"""vLLM with outpace's heads and drafters: the same answers as without speculation, and our accepted lengths.

    make engines

One configuration after the other, in float32, with what ``outpace serve --engine vllm`` writes. OUTPACE_ENGINE_RUNS
names some of them alone, by their labels, "eagle3;Proposer: sam"; "server" and "certificates" are the tests of the
server and of ``test_certificate.py``. What was found is written to the file that OUTPACE_ENGINES names;
``benchmarks/engines_table.py`` makes the tables of docs/engines.md of it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine_results import RUNS, keep, missing, wanted
from outpace.bench.peers.weights import find as find_weights
from outpace.bench.peers.worker import environment
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.metrics import total
from outpace.core.sampling import SamplingParams
from outpace.datastore.build import build_datastore
from outpace.datastore.corpus import TokenPiece
from outpace.datastore.shipped_answers import shipped_answers
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.integrations.vllm.interpreter import Interpreter, find_interpreter
from outpace.integrations.vllm.plugin_path import plugin_path
from outpace.integrations.vllm.proposer_options import ProposerOptions
from outpace.integrations.vllm.server import running_server
from outpace.integrations.vllm.speculative_config import CUSTOM_CLASS, Wanted, speculation
from outpace.methods.registry import build
from outpace.model import Model
from outpace.prompts.questions import load_prompts
from vllm_client import Client, acceptance_length

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.model]
MODEL, LENGTH, PROMPTS = "smollm2", 64, 8
NEAR = 0.1
"""How far accepted lengths may be apart: rounding in other orders lets answers of near ties differ."""
HEADS = {"eagle3": 3, "dflash": 3, "draft-lm": 3}
"""Draft tokens in a round, by kind of head."""
OURS: dict[str, tuple[str, dict[str, Any], Fixed]] = {
    "eagle3": ("eagle3", {"topk": 1}, Fixed(3, 1, 3)),
    "dflash": ("dflash", {"num_draft_tokens": 3}, Fixed(3, 1, 3)),
    "draft-lm": ("distill", {"topk": 1}, Fixed(3, 1, 3)),
}
OWN = ("pld", "sam")
"""Methods that vLLM has an implementation of its own of."""
TOKEN_METHODS = ("sam", "pld", "recycling", "cacheback", "rest", "cascade", "merge", "auto")
MOST = 8
"""Draft tokens in a round, of the plug-in."""
found: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def written() -> Iterator[None]:
    """What was found, for the table."""
    yield
    keep("vllm", found)


@pytest.fixture(scope="module")
def vllm() -> Interpreter:
    try:
        one = find_interpreter(os.environ.get("OUTPACE_VLLM_PYTHON"))
    except BadInput as error:
        missing(str(error))
    assert one.version is not None
    found["version"] = one.version
    return one


def prompts(model: Model) -> list[list[int]]:
    return [model.tokenizer.chat([{"role": "user", "content": one.turns[0]}]) for one in load_prompts(None, PROMPTS)]


def decoded(
    model: Model, name: str, settings: dict[str, Any], controller: Fixed | None
) -> tuple[list[list[int]], float]:
    """Our answers in the same precision, and the accepted length over all of them."""
    method: Method = build(name, model.context(), settings)
    if controller is not None:
        method = replace(method, controller=controller)
    answers, metrics = [], []
    for prompt in prompts(model):
        decoder = Decoder(model.target, model.tokenizer)
        generation = decoder.submit(Request(tuple(prompt), method, SamplingParams(), LENGTH))
        decoder.run()
        answers.append(list(generation.tokens))
        metrics.append(generation.metrics)
    length = total(metrics).figures()["mean_acceptance_length"]
    return answers, float(length)


@dataclass
class Answered:
    """What one configuration of vLLM's engine gave: its answers in token ids, and the accepted length."""

    answers: list[list[int]]
    accepted: float

    @property
    def length(self) -> float:
        return acceptance_length(sum(map(len, self.answers)), len(self.answers), self.accepted)


PASSAGE = (
    "The harbour was built in 1874 by the town council, which had borrowed the money from three banks in the capital."
)
CHUNKED = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}
SHORT = 192
"""A context that answers reach the end of."""


def runs(vllm: Interpreter, model: Model, datastore: Path) -> Iterator[dict[str, Any]]:
    """All configurations: vLLM as it is, each head, the plug-in with each method, and vLLM's own lookup."""
    served = find_weights(MODEL, "float32").folder
    questions = prompts(model)
    plain = {"speculative_config": None, "prompts": questions}
    ours = {"method": "custom_class", "model": CUSTOM_CLASS, "num_speculative_tokens": MOST}
    yield {**plain, "label": "plain"}
    for kind, count in HEADS.items():
        config = speculation(Wanted(head=kind, num_draft_tokens=count), lambda: model, served, vllm).config
        yield {**plain, "label": kind, "speculative_config": config}
    for method in TOKEN_METHODS:
        told = {"method": method, "adaptive": False, **({"datastore": str(datastore)} if method == "rest" else {})}
        configs = {"speculative_config": ours, "additional_config": {"outpace": told}}
        yield {**plain, "label": f"Proposer: {method}", **configs}
    for method in OWN:
        config = speculation(Wanted(method), lambda: model, "", vllm).config
        yield {**plain, "label": f"own {method}", "speculative_config": config}
    mixed = [one[: 64 + 16 * (at % 3)] for at, one in enumerate(questions)]
    lengths = [24 + 8 * (at % 5) for at in range(len(mixed) - 1)] + [SHORT - len(mixed[-1])]
    together = {"prompts": mixed, "lengths": lengths, "together": True, "context": SHORT, "requests": 3}
    yield {**together, "label": "together, plain", "speculative_config": None, "engine": CHUNKED}
    yield {**together, "label": "together", "speculative_config": ours, "engine": CHUNKED}
    repeated = [[*one, *one[-24:], *one[-24:]] for one in questions]  # drafts are made at once
    for label, temperature in (("greedy", 0.0), ("cold", 1e-3)):
        yield {**plain, "label": label, "prompts": repeated, "temperature": temperature, "speculative_config": ours}


@pytest.fixture(scope="module")
def engine(vllm: Interpreter, smollm2_float32: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answered]:
    """All configurations by label, run in one process of vLLM's interpreter; vLLM's own lookup in another for each, as
    no engine starts in a process that has loaded numba for it."""
    datastore = tmp_path_factory.mktemp("engines") / "answers"
    tokenizer = smollm2_float32.tokenizer
    texts = (TokenPiece(one, True) for one in shipped_answers(tokenizer, 100_000))
    build_datastore(datastore, texts, tokenizer.fingerprint)
    configured = runs(vllm, smollm2_float32, datastore)
    chosen = [run for run in configured if run["label"] == "plain" or wanted(run["label"])]
    if len(chosen) == 1:
        return {}
    folder = find_weights(MODEL, "float32").folder
    plan = {"folder": folder, "dtype": "float32", "context": 1024, "length": LENGTH}
    alone = [run for run in chosen if run["label"].startswith("own")]
    replies: list[dict[str, Any]] = []
    for together in ([run for run in chosen if run not in alone], *([run] for run in alone)):
        ran = subprocess.run(
            [vllm.path, str(Path(__file__).with_name("vllm_worker.py"))],
            input=json.dumps({**plan, "runs": together}),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**environment(1, foreign=True, offline=True), "PYTHONPATH": str(plugin_path())},
        )
        replies += map(json.loads, ran.stdout.splitlines())
    failed = {one["label"]: one["error"] for one in replies if "error" in one}
    assert not failed
    return {one["label"]: Answered(one["answers"], one["accepted"]) for one in replies}


def of(engine: dict[str, Answered], label: str) -> Answered:
    if label not in engine:
        pytest.skip(f"not among {RUNS}")
    return engine[label]


def compared(engine: dict[str, Answered], label: str, ours: float | None) -> None:
    """The answers are those without speculation, token for token, and the accepted length is ours."""
    one, plain = of(engine, label), engine["plain"]
    identical = sum(map(list.__eq__, one.answers, plain.answers))
    found.setdefault("methods", {})[label] = {
        "prompts": PROMPTS,
        "identical": identical,
        "mean_acceptance_length": one.length,
        "outpace": ours,
    }
    assert plain.length == 1.0
    assert identical == PROMPTS
    assert one.length > 1.0
    if ours is not None:
        assert one.length == pytest.approx(ours, abs=NEAR)


@pytest.mark.parametrize("kind", HEADS)
def test_a_shipped_head(kind: str, engine: dict[str, Answered], smollm2_float32: Model) -> None:
    of(engine, kind)
    compared(engine, kind, decoded(smollm2_float32, *OURS[kind])[1])


@pytest.mark.parametrize("method", TOKEN_METHODS)
def test_the_proposer(method: str, engine: dict[str, Answered], smollm2_float32: Model) -> None:
    """The methods that draft chains here too have the same accepted length; vLLM verifies one path of the trees of the
    others."""
    label = f"Proposer: {method}"
    of(engine, label)
    chain = method in ("sam", "pld")
    ours = decoded(smollm2_float32, method, {"num_draft_tokens": MOST}, None)[1] if chain else None
    compared(engine, label, ours)


@pytest.mark.parametrize("method", OWN)
def test_its_own_lookup(method: str, engine: dict[str, Answered]) -> None:
    compared(engine, f"own {method}", None)


def test_requests_side_by_side_and_to_the_end_of_the_context(engine: dict[str, Answered]) -> None:
    """Rows join, leave and move; prompts come in chunks; and near the end of the context the proposer is not called."""
    assert of(engine, "together").answers == of(engine, "together, plain").answers


def test_temperatures_of_builds_for_cpus(engine: dict[str, Answered]) -> None:
    """A temperature near 0 gives nearly the greedy answers, where the engine keeps it."""
    greedy, cold = of(engine, "greedy"), of(engine, "cold")
    pairs = zip(greedy.answers, cold.answers, strict=True)
    same = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=True))
    share = same / sum(map(len, greedy.answers))
    found["temperature kept"] = round(share, 3)
    assert share > 0.9


def test_the_server(vllm: Interpreter) -> None:
    """As ``outpace serve --engine vllm`` starts it: it answers, drafts, and refuses min_p and logit_bias."""
    if not wanted("server"):
        pytest.skip(f"not among {RUNS}")
    config = {"method": "custom_class", "model": CUSTOM_CLASS, "num_speculative_tokens": MOST}
    with running_server(MODEL, config, python=vllm.path, threads=1, proposer=ProposerOptions(method="pld")) as url:
        client = Client(url, MODEL)
        assert len(client.answer([5, 6, 7, 8] * 10, 24, vllm_xargs={"namespace": "team"})) == 24
        asked = {"role": "user", "content": f"Repeat this text word for word: {PASSAGE}"}
        chat = {"model": MODEL, "messages": [asked], "max_tokens": 64, "temperature": 0}
        assert client.status("/v1/chat/completions", chat) == 200
        assert client.accepted() > 0
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 1.0}
        assert client.status("/v1/completions", body) == 200
        assert client.status("/v1/completions", {**body, "min_p": 0.1}) == 400
        assert client.status("/v1/completions", {**body, "logit_bias": {"5": 1.0}}) == 400
