"""The certificate of servers: lossless ones pass, planted defects are refused, and bad input is one line."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_support import Letters, Run, refused, runner
from live_support import live
from outpace.certify.endpoint import Endpoint, distance
from outpace.certify.engine_certificate import EngineCertificate
from outpace.certify.engine_plan import Plan
from outpace.certify.engines import certify_engine
from outpace.certify.fit import Comparison, compare, detectable_bias
from outpace.certify.server_client import Refused, Server
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.model import Model
from outpace.targets.table import TableTarget
from planted_server import LETTERS, Planted, planted, running
from serving_support import service

TEXTS = ["abc", "dd", "kla", "ghiabc"]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture(scope="module")
def honest() -> Iterator[str]:
    """A lossless server, which is also the baseline of others."""
    with planted(drafted=False) as address:
        yield address


def certified(
    address: str, baseline: str | None = None, target: Model | None = None, **about: Any
) -> EngineCertificate:
    params = SamplingParams(temperature=about.pop("temperature", 1.0), top_p=about.pop("top_p", 1.0))
    plan = Plan(TEXTS, params, **{"samples": 1500, "draft_length": 3, "seed": 1, **about})
    base = None if baseline is None else Server(baseline, "toy", name="the baseline")
    return certify_engine(Server(address, "toy"), plan, baseline=base, target=target)


class PlantedLetters(Letters):
    """The planted server's tokenizer."""

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(char) if char in LETTERS else 0 for char in text]

    def decode(self, ids: Any) -> str:
        return "".join(LETTERS[token] for token in ids)

    def __len__(self) -> int:
        return len(LETTERS)


def same_weights(seed: int = 3) -> Model:
    """The planted server's weights as a model of outpace."""
    from outpace.targets.table import random_table

    target = TableTarget(len(LETTERS), random_table(len(LETTERS), seed, order=2, sharpness=1.0))
    return Model("weights", target, PlantedLetters(), frozenset(), {"dtype": "float32"})


def test_a_lossless_server_passes_against_a_baseline(honest: str) -> None:
    with planted() as address:
        found = certified(address, honest)
    assert found.lossless is True, found.verdict
    assert not found.inconclusive
    assert found.reference == honest
    assert found.logprobs == {"kind": "raw", "top": 20}
    assert found.speculation is not None and found.speculation["drafted"] > 1000
    assert found.numerics is not None and found.numerics.bias < 1e-9
    assert found.rescored is not None and found.rescored.prefixes == 64
    assert found.detectable_bias is not None and found.detectable_bias < 0.35
    names = [one.name for one in found.checks]
    assert "token 2, against the baseline" in names and "token 1, against the baseline" not in names
    assert "token 5, against the baseline" in names  # the bonus token of a draft of three
    assert "rank by the engine's log-probabilities" in names
    json.dumps(found.public())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("processed", [False, True])
def test_without_a_baseline_the_log_probabilities_decide(temperature: float, processed: bool) -> None:
    with planted(processed=processed) as address:
        fine = certified(address, temperature=temperature)
    with planted(processed=processed, bias=0.2) as address:
        biased = certified(address, temperature=temperature)
    assert fine.lossless is True, fine.verdict
    assert fine.logprobs == {"kind": "processed" if processed else "raw", "top": 20}
    assert biased.lossless is False
    assert "rank by the engine's log-probabilities" in biased.verdict


def test_a_bias_that_the_power_covers_is_refused_by_the_two_sample_test(honest: str) -> None:
    """The planted rule takes the most likely token unasked: total variation of bias * (1 - its probability)."""
    with planted(bias=0.5, logprobs=0) as address:
        found = certified(address, honest, samples=3000)
    assert found.lossless is False
    failed = [one for one in found.checks if one.passed is False]
    assert failed and all("against the baseline" in one.name for one in failed)
    for one in failed:
        assert one.detectable_bias is not None and one.detectable_bias < 0.35
    assert any("log-probabilities" in one and "none" in one for one in found.remarks)


def test_the_two_sample_test_rejects_as_often_as_it_says() -> None:
    """Of 400 pairs of equal samples about one in twenty at 0.05; more than 8 % happens once in a thousand."""
    rng = random.Random(4)
    weights = [2.0**-one for one in range(12)]
    low = 0
    for _ in range(400):
        total = Comparison()
        for _ in range(10):
            sides = [Counter(rng.choices(range(12), weights, k=60)) for _ in range(2)]
            total += compare(sides[0], sides[1])
        low += total.p_value() < 0.05
    assert 5 <= low <= 33


def test_power_holds_where_it_is_stated() -> None:
    """A bias of the detectable size, spread alike over the outcomes, is found about nine times in ten."""
    rng, size, alpha = random.Random(5), 400, 0.01
    one = compare(Counter({0: size // 2, 1: size // 2}), Counter({0: size // 2, 1: size // 2}))
    bias = detectable_bias(one.size, one.freedom, alpha)
    assert bias is not None
    found = 0
    for _ in range(300):
        ours = Counter(rng.choices((0, 1), (0.5 + bias, 0.5 - bias), k=size))
        theirs = Counter(rng.choices((0, 1), k=size))
        found += compare(ours, theirs).p_value() < alpha
    assert 0.82 <= found / 300 <= 0.97


def test_the_null_is_a_bias_and_not_none() -> None:
    ours, theirs = Counter({0: 5500, 1: 4500}), Counter({0: 5000, 1: 5000})
    found = compare(ours, theirs)
    assert found.p_value() < 1e-6
    assert found.p_value(bias=0.05) > 0.1
    exact, allowed = detectable_bias(5000, 1, 0.01), detectable_bias(5000, 1, 0.01, null=0.05)
    assert exact is not None and allowed is not None and allowed > exact + 0.03


def test_wrong_greedy_answers_are_refused_and_near_ties_are_not(honest: str) -> None:
    with planted(wrong=7) as address:
        found = certified(address, honest)
        alone = certified(address)
    assert found.lossless is False and "greedy" in found.verdict
    assert found.first_difference is not None and found.first_difference["position"] == 7
    assert found.first_difference["gap"] > found.first_difference["noise"]
    assert alone.lossless is False and "greedy" in alone.verdict
    with planted(wrong=7, logprobs=0) as address, planted(logprobs=0, drafted=False) as base:
        unknown = certified(address, base, temperature=0.0)
    assert unknown.lossless is None and unknown.inconclusive
    assert "no log-probabilities" in unknown.verdict


def test_a_tie_is_told_from_a_bug() -> None:
    """Two tokens of equal probability everywhere: taking the other one is a near tie."""
    one, other = Planted(drafted=False), Planted(wrong=7, wrong_rank=1)
    for server in (one, other):
        table = server.table

        def tied(path: tuple[int, ...], table: Any = table) -> Any:
            logits = table(path).clone()
            best = logits.topk(2).indices
            logits[best[1]] = logits[best[0]] - 1e-5
            return logits

        server.table = tied
    with running(one) as base, running(other) as address:
        found = certified(address, base, temperature=0.0)
    assert found.lossless is True, found.verdict
    assert "4 near ties" in found.verdict


def test_scores_that_forget_the_prompt_are_found_by_rescoring() -> None:
    with planted(forgets=True) as address:
        found = certified(address)
    assert found.lossless is False
    assert found.rescored is not None and found.rescored.differing


@pytest.mark.parametrize(
    "about",
    [{"ids": False}, {"choices": False}, {"extensions": False}, {"logprobs": 5}],
    ids=lambda one: next(iter(one)),
)
def test_servers_that_have_less(about: dict[str, Any], honest: str) -> None:
    with planted(**about) as address:
        fine = certified(address, honest if "ids" not in about else None, samples=600)
    with planted(bias=0.5, **about) as address:
        biased = certified(address, honest if "ids" not in about else None, samples=1500)
    assert fine.lossless is True, fine.verdict
    assert biased.lossless is False


def test_texts_are_compared_where_a_server_returns_nothing_else(honest: str) -> None:
    with planted(ids=False, logprobs=0) as address, planted(ids=False, logprobs=0, bias=0.6) as biased:
        fine, refused_ = certified(address, honest), certified(biased, honest, samples=3000)
    assert fine.lossless is True, fine.verdict
    assert any(one.name == "character 2, against the baseline" for one in fine.checks)
    assert refused_.lossless is False


def test_the_target_of_the_same_weights_is_a_reference() -> None:
    with planted(logprobs=0) as address, planted(logprobs=0, bias=0.3) as biased:
        fine, found = certified(address, target=same_weights()), certified(biased, target=same_weights())
    assert fine.lossless is True, fine.verdict
    assert fine.reference == "outpace's target weights (float32)"
    assert found.lossless is False and "by the target's probabilities" in found.verdict
    with planted() as address, pytest.raises(BadInput, match="other weights"):
        certified(address, target=same_weights(4))


def test_structured_outputs(honest: str) -> None:
    with planted(formats="valid") as address:
        fine = certified(address, samples=300)
    with planted(formats="broken") as address:
        broken = certified(address, samples=300)
    assert fine.lossless is True
    assert fine.checks[-1].passed is True and fine.checks[-1].note == "8 of 8 answers valid"
    assert broken.lossless is False and "structured outputs" in broken.verdict


def test_a_server_that_drafted_nothing_is_not_called_lossless(honest: str) -> None:
    with planted(drafted=False) as address:
        found = certified(address, honest, samples=300)
    assert found.lossless is None and not found.inconclusive
    assert "drafted nothing" in found.verdict


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "slow": ({"delay": 1.0}, "did not answer within 0.2 s"),
    "slow in pieces": ({"drips": 0.05}, "did not answer within 0.2 s"),
    "cut streams": ({"cut_streams": True}, "cut a stream after 1 events"),
    "cut bodies": ({"cut_bodies": True}, "cut its answer"),
    "key": ({"key": "secret"}, "refused a request without a key"),
    "no log-probabilities": ({"logprobs": 0}, "returns no log-probabilities"),
    "fixed seed": ({"fixed_seed": True}, "repeats its answers"),
}


@pytest.mark.parametrize("about", BAD)
def test_bad_servers(about: str) -> None:
    defects, said = BAD[about]
    with planted(**defects) as address, pytest.raises(BadInput, match=said):
        plan = Plan(TEXTS, SamplingParams(temperature=1.0), 1500, 3)
        certify_engine(Server(address, "toy", time_limit=0.2 if about.startswith("slow") else 20.0), plan)


COMMANDS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "slow": ({"delay": 1.0}, ("--time-limit", "0.2"), ("did not answer within 0.2 s", "--time-limit")),
    "slow in pieces": ({"drips": 0.05}, ("--time-limit", "0.2"), ("did not answer within 0.2 s",)),
    "cut streams": ({"cut_streams": True}, (), ("cut a stream after 1 events",)),
    "cut bodies": ({"cut_bodies": True}, (), ("cut its answer short",)),
    "no log-probabilities": ({"logprobs": 0}, (), ("no log-probabilities", "--baseline", "--target-model")),
    "another tokenizer": ({}, ("--target-model", "letters"), ("tokenizer of --target-model is not that of",)),
}


@pytest.mark.parametrize("about", COMMANDS)
def test_bad_servers_end_the_command_in_one_line(about: str, cli: Run) -> None:
    """The target that stands for every model here, a toy, has another alphabet than the planted server."""
    defects, options, said = COMMANDS[about]
    with planted(**defects) as address:
        refused(cli("certify", "--model", "toy", "--endpoint", address, "--limit", "2", *options, "--json"), *said)


def test_without_log_probabilities_the_certificate_says_what_remained(honest: str) -> None:
    with planted(logprobs=0) as address:
        found = certified(address, honest)
    assert found.lossless is True, found.verdict
    assert {one.name.partition(",")[0] for one in found.checks if one.passed is not None} >= {"token 2", "token 3"}
    assert not any("log-probabilities" in one.name for one in found.checks)
    said = " ".join(found.remarks)
    for test in ("whether both servers have the same weights", "no prefix was rescored", "own log-probabilities"):
        assert test in said


def test_bad_references(honest: str) -> None:
    with planted(weights=4) as other, pytest.raises(BadInput, match="has other weights"):
        certified(honest, other)
    plan = Plan(TEXTS, SamplingParams(temperature=1.0))
    with pytest.raises(BadInput, match=r"has no model 'tox'; did you mean 'toy'\?"):
        certify_engine(Server(honest, "tox"), plan)
    with pytest.raises(BadInput, match="nothing answers at http"):
        certify_engine(Server("http://127.0.0.1:9", "toy"), plan)
    with pytest.raises(BadInput, match="must be the address of a server"):
        Server("localhost:8000", "toy")
    model = same_weights()
    model.tokenizer.encode = lambda text: [1, 2]  # type: ignore[method-assign]
    with pytest.raises(BadInput, match="tokenizer of --target-model"):
        certified(honest, target=model)
    with pytest.raises(Refused, match="no such model"):
        Server(honest, "other").complete("a", 1)


def test_distances() -> None:
    assert distance({1: -0.1, 2: -3.0}, {1: -0.1, 2: -3.0}) == 0.0
    assert distance({1: -0.1}, {2: -0.1}) == 1.0
    assert distance({1: -1.0, 2: -2.0}, {1: -2.0, 2: -1.0}, 0.5) == pytest.approx(0.7616, abs=1e-3)  # tanh(1)


def test_our_own_server_is_compared_with_itself_without_speculation() -> None:
    with live(service()) as address:
        endpoint = Endpoint.probe(Server(address, "toy"))
        assert (endpoint.outpace, endpoint.has_ids, endpoint.raw, endpoint.choices) == (True, True, True, 16)
        found = certified(address, samples=1000)
    assert found.reference == "the same server without speculation"
    assert found.lossless is True, found.verdict
    assert found.speculation is not None and found.speculation["drafted"] > 0
    assert any(one.name == "token 1, against the baseline" for one in found.checks)


def test_the_command(cli: Run, honest: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TEXTS))
    common = ["certify", "--model", "toy", "--prompts", str(prompts), "--seed", "1", "--samples", "600"]
    with planted(key="secret") as address, planted(bias=0.6) as biased:
        (key := tmp_path / "key").write_text("secret\n")
        ran = cli(*common, "--endpoint", address, "--api-key-file", str(key), "--draft-length", "2", "--json")
        assert ran.code == 0, ran
        found = json.loads(ran.out)
        assert found["lossless"] is True and found["endpoint"] == address and found["checks"]
        words = cli(*common, "--endpoint", biased, "--baseline", honest)
        assert words.code == 1 and "not lossless" in words.out and "refused: " in words.out
        assert all(line.startswith("  ") for line in words.out.splitlines()[1:])  # a line each, of any length
        refused(cli(*common, "--endpoint", address), "--api-key-file")
    refused(cli(*common, "--endpoint", address), "nothing answers")
    refused(cli("certify"), "--endpoint URL")
    refused(cli("certify", "pld", "--endpoint", honest), "not both")
    refused(cli("certify", "--endpoint", honest, "--level", "greedy"), "--level")
    refused(cli("certify", "pld", "--baseline", honest), "--endpoint")
    refused(cli("certify", "pld", "--vllm-python", "python"), "--engine vllm")
    refused(cli("certify", "pld", "--no-plugin"), "--engine vllm")
    refused(cli("certify", "pld", "--engine", "vlm"), "did you mean 'vllm'?")
    refused(cli("certify", "--engine", "vllm", "--endpoint", honest), "not both")
    refused(cli("certify", "--engine", "vllm", "--vllm-python", str(tmp_path / "none")), "there is no file")
    refused(cli("certify", "--endpoint", honest, "--draft-length", "0"), "--draft-length")
    refused(cli("certify", "--endpoint", honest, "--time-limit", "0"), "--time-limit")
    refused(cli(*common, "--endpoint", honest, "--api-key-file", str(tmp_path / "none")), "cannot read")
