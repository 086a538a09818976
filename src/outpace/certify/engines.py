"""Is a server's speculation lossless? A certificate for any server with OpenAI's API, from its answers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.certify.certificate import Check, Rescored
from outpace.certify.endpoint import Endpoint, units
from outpace.certify.engine_baseline import check_other_server, drafts_nothing, is_itself, without_speculation
from outpace.certify.engine_certificate import EngineCertificate
from outpace.certify.engine_greedy import GreedyResult, against_baseline, against_itself, against_target
from outpace.certify.engine_plan import Plan, check_randomness
from outpace.certify.engine_sampled import (
    Draws,
    SampledTest,
    against_itself as baseline_against_itself,
    by_logprobs,
    by_target,
    two_samples,
)
from outpace.certify.engine_verdict import Evidence, conclude
from outpace.certify.fit import holm
from outpace.certify.near_ties import near_tie_gap
from outpace.certify.numerics import CONTEXTS, UNKNOWN, Numerics, measure, rescore, scored, spread
from outpace.certify.rescoring import PREFIXES
from outpace.certify.same_model import check_same_model, check_same_weights, check_tokenizer
from outpace.certify.server_client import Answer, Prompt, Server
from outpace.certify.structured import check_structured
from outpace.core.errors import BadInput
from outpace.core.progress import stage
from outpace.core.sampling import SamplingParams
from outpace.model import Model

GREEDY_LENGTH = 48
_BASELINE = "give --baseline (the same model without speculation)"
_REFERENCE = f"{_BASELINE} or --target-model (its weights here)"


def certify_engine(
    server: Server, plan: Plan, *, baseline: Server | None = None, target: Model | None = None
) -> EngineCertificate:
    """Test a server against ``baseline``, the same model without speculation, or ``target``, the same weights here.

    Without either, outpace's own server is compared with itself without speculation, and any other with its own
    log-probabilities. Raises BadInput for servers that do not answer, and for a reference of another model.
    """
    if baseline is not None and target is not None:
        raise BadInput("give --baseline or --target-model, not both")
    with stage("asking what the servers offer", brief=True):
        endpoint = Endpoint.probe(server)
        if baseline is not None:
            check_other_server(endpoint, baseline)
        if baseline is None and target is None and endpoint.outpace:
            baseline = without_speculation(server)
        reference = None if baseline is None else Endpoint.probe(baseline)
    if reference is None and target is None and not endpoint.top_logprobs:
        raise BadInput(
            f"{server.where} returns no log-probabilities, and there is nothing else to compare with; {_REFERENCE}"
        )
    return _Certification(endpoint, reference, target, plan).run()


@dataclass(slots=True)
class _Certification:
    endpoint: Endpoint
    baseline: Endpoint | None
    target: Model | None
    plan: Plan
    numerics: Numerics = UNKNOWN
    bias: float = 0.0
    remarks: list[str] = field(default_factory=list)
    ours: dict[int, list[Answer]] = field(default_factory=dict)
    """Sampled answers by prompt."""
    theirs: dict[int, list[Answer]] = field(default_factory=dict)
    rescored: Rescored | None = None

    @property
    def first(self) -> int:
        """The first position that can be drafted: another engine takes the first token from the prompt's pass."""
        return 0 if self.endpoint.outpace else 1

    def run(self) -> EngineCertificate:
        prompts = self._prompts()
        before = self.endpoint.speculated()
        baseline_before = None if self.baseline is None else self.baseline.speculated()
        self._check_reference(prompts)
        self._check_stream(prompts[0])
        sampled = not self.plan.params.greedy
        if sampled:
            self._sample(prompts)
            self._measure()
        greedy = self._greedy(prompts)
        if self.baseline is not None and not drafts_nothing(self.baseline, baseline_before):
            self.remarks.append("the baseline does not count draft tokens: whether the baseline drafts is not known")
        tests = self._tests() if sampled else []
        able = sum(bool(one.freedom) for one in tests)  # others can find nothing, and are not corrected for
        checks = [one.check(able, self.plan.alpha, self.bias) for one in tests]
        structured = check_structured(self.endpoint, self.plan.params, self._seed(9, 0))
        return self._conclude(greedy, tests, checks, structured, before)

    def _prompts(self) -> list[Prompt]:
        if self.target is None:
            return list(self.plan.texts)
        check_tokenizer(self.endpoint, self.target.tokenizer)
        return [self.target.tokenizer.encode(text) for text in self.plan.texts]

    def _check_reference(self, prompts: Sequence[Prompt]) -> None:
        """Raise BadInput for a reference with other weights."""
        if self.baseline is not None and not self._comparable:
            self.remarks.append(
                "whether both servers have the same weights was not checked: they do not both return log-probabilities"
            )
        elif self.baseline is not None:
            check_same_model(self.endpoint, self.baseline, prompts)
        elif self.target is not None and self.endpoint.top_logprobs and self.endpoint.has_ids:
            self.bias = check_same_weights(self.endpoint, self.target, prompts, self.plan.params)

    @property
    def _comparable(self) -> bool:
        """Whether both servers have log-probabilities of the same kind, under the same names."""
        both = self.baseline
        return (
            both is not None
            and both.names_tokens is self.endpoint.names_tokens
            and both.raw is self.endpoint.raw
            and bool(both.top_logprobs and self.endpoint.top_logprobs)
        )

    def _check_stream(self, prompt: Prompt) -> None:
        """Raise BadInput for a server that cuts streams."""
        self.endpoint.server.stream(prompt, 8, temperature=0.0)

    def _seed(self, side: int, number: int) -> int | None:
        return self.plan.request_seed(side, number)

    def _sample(self, prompts: Sequence[Prompt]) -> None:
        """Ask both sides in turn. Where their draws are compared, only every other request asks for log-probabilities,
        as most clients do not."""
        sides = [(self.endpoint, self.ours)] + ([] if self.baseline is None else [(self.baseline, self.theirs)])
        wanted = self.plan.answers
        with stage("sampled answers", total=len(prompts) * wanted * len(sides), unit="answers") as at:
            done = 0
            for number, prompt in enumerate(prompts):
                for turn in range(0, wanted, chunk := max(one.choices for one, _ in sides)):
                    count = min(chunk, wanted - turn)
                    for side, (asked, found) in enumerate(sides):
                        seed = self._seed(side, number * 1000 + turn)
                        logprobs = self.baseline is None or turn // chunk % 2 == 0
                        got = asked.sample(prompt, self.plan.length, count, self.plan.params, seed, logprobs=logprobs)
                        found.setdefault(number, []).extend(got[:count])
                        done += count
                        at.move(done)
        for asked, found in sides:
            check_randomness(asked, found, self.plan.seed)

    def _measure(self) -> None:
        """The baseline's numerics, and then the engine's prefixes scored again."""
        temperature = self.plan.params.temperature
        if self.baseline is not None and self._comparable:
            contexts = spread(scored(_all(self.theirs), self.first), CONTEXTS)
            self.numerics = measure(self.baseline, contexts, temperature)
            self.bias = self.numerics.bias
        if not self.numerics.contexts and self.baseline is not None:
            self.remarks.append("the baseline's numerics were not measured: it returns no ids or log-probabilities")
        elif not self.numerics.contexts and self.target is not None:
            gap = near_tie_gap(self.target.target.dtype)
            self.numerics = Numerics(0, self.bias, 0.0, gap)
        reference = self.baseline if self._comparable else self.endpoint
        assert reference is not None
        contexts = spread(scored(_all(self.ours), self.first), PREFIXES)
        if contexts and reference.has_ids and reference.top_logprobs:
            self.rescored = rescore(reference, contexts, temperature, self.numerics.tolerance(self.plan.params))
        else:
            self.remarks.append("no prefix was rescored: this needs token ids and log-probabilities")

    def _greedy(self, prompts: Sequence[Prompt]) -> GreedyResult | None:
        endpoint, baseline = self.endpoint, self.baseline
        with stage("greedy answers", total=len(prompts), unit="prompts") as at:

            def tell() -> None:
                at.move(at.done + 1)

            if baseline is not None:
                return against_baseline(endpoint, baseline, prompts, GREEDY_LENGTH, self.numerics, tell)
            if self.target is not None and endpoint.has_ids:
                ids = [list(map(int, prompt)) for prompt in prompts]
                return against_target(endpoint, self.target, ids, GREEDY_LENGTH, tell)
            if endpoint.raw is not False and endpoint.top_logprobs:
                return against_itself(endpoint, prompts, GREEDY_LENGTH, self.numerics, tell)
        self.remarks.append("greedy answers were not compared: nothing shows which token is the most likely one")
        return None

    def _tests(self) -> list[SampledTest]:
        return [*self._against_baseline(), *self._against_target(), *self._against_logprobs()]

    def _against_baseline(self) -> list[SampledTest]:
        if self.baseline is None:
            return []
        draws, unit = self._draws()
        return two_samples(draws, self.first if unit == "token" else 0, self.plan.length, self.bias, unit)

    def _draws(self) -> tuple[list[Draws], str]:
        assert self.baseline is not None
        kind = self.endpoint.names_tokens
        by_text = kind is None or kind is not self.baseline.names_tokens
        draws = [
            Draws(units(self.ours[at], by_text=by_text), units(self.theirs[at], by_text=by_text)) for at in self.ours
        ]
        return draws, "character" if by_text else "token"

    def _against_target(self) -> list[SampledTest]:
        if self.target is None:
            return []
        if not self.endpoint.has_ids or not self.endpoint.never_ends:
            self.remarks.append("ranks by the target's probabilities were not tested: no token ids, or no ignore_eos")
            return []
        found = {}
        for at, answers in self.ours.items():
            prompt = tuple(self.target.tokenizer.encode(self.plan.texts[at]))
            found[prompt] = [[int(token) for token in one.tokens] for one in answers]
        with stage("scoring with the target", brief=True):
            return by_target(found, self.target.target, self.plan.params, bias=self.bias, first=self.first)

    def _against_logprobs(self) -> list[SampledTest]:
        endpoint, params = self.endpoint, self.plan.params
        answers = [one for one in _all(self.ours) if one.top is not None]
        left_out = "ranks by the engine's own log-probabilities were not tested: "
        plain = SamplingParams(temperature=params.temperature)
        if not endpoint.top_logprobs or not answers:
            self.remarks.append(left_out + "it returns none")
        elif endpoint.raw is None:
            self.remarks.append(left_out + "whether they are raw or processed could not be seen")
        elif endpoint.raw and replace(params, seed=None) != plain:
            self.remarks.append(left_out + "they are raw, and these sampling parameters need all tokens' to be applied")
        elif any(one.ended and len(one.tokens) < self.plan.length for one in answers):
            self.remarks.append(left_out + "some answers end, and that of the end is not returned (no ignore_eos)")
        else:
            raw, top = endpoint.raw, endpoint.top_logprobs
            return by_logprobs(answers, params, top, raw=raw, bias=self.bias, first=self.first)
        return []

    def _conclude(
        self,
        greedy: GreedyResult | None,
        tests: Sequence[SampledTest],
        sampled: list[Check],
        structured: Check,
        before: tuple[int, int] | None,
    ) -> EngineCertificate:
        alpha = self.plan.alpha
        extra: list[Check] = []
        if self.rescored is not None:
            one = self.rescored
            extra.append(Check("rescored prefixes", one.passed, max_abs_error=one.largest_difference, note=str(one)))
        power = [one.detectable_bias for one in sampled if one.detectable_bias is not None]
        doubts = self._untested(greedy, tests, powerful=bool(power))
        doubts += [] if greedy is None or not greedy.undecided else [str(greedy)]
        if tests and self.baseline is not None:
            draws, unit = self._draws()
            first = self.first if unit == "token" else 0
            itself = baseline_against_itself(draws, first, self.plan.length, self.bias, unit, alpha)
            extra.append(itself)
            if itself.passed is False:
                doubts.append(f"the baseline differs from itself ({itself.note})")
                extra[-1] = replace(itself, passed=None)
        checks = [*(greedy.checks if greedy else ()), *sampled, *extra, structured]
        p_values = [one.p_value for one in tests if one.freedom]
        adjusted = holm(p_values) if p_values else None
        speculation = self._speculation(before)
        drafted = None if speculation is None else speculation["drafted"]
        bias = max(power, default=None)
        evidence = Evidence(greedy, sampled, self.rescored, structured, adjusted, len(p_values), bias)
        lossless, inconclusive, verdict = conclude(evidence, doubts, drafted)
        return EngineCertificate(
            self.endpoint.server.url,
            self.endpoint.server.model,
            self._reference,
            lossless,
            inconclusive,
            verdict,
            self.plan.params.described,
            self._logprobs,
            speculation,
            self.numerics if self.numerics.contexts else None,
            alpha,
            self.bias,
            adjusted,
            bias,
            greedy.first_difference if greedy else None,
            self.rescored,
            tuple(checks),
            tuple(self.remarks),
        )

    def _untested(self, greedy: GreedyResult | None, tests: Sequence[SampledTest], *, powerful: bool) -> list[str]:
        """What was to be certified and no test has covered: a server is not lossless because nothing was asked.

        ``powerful``: whether any sampled test could have shown a bias.
        """
        reference = _BASELINE if self.target is not None else _REFERENCE
        if self.plan.params.greedy:
            return [] if greedy is not None else [f"no answer was compared; {reference}"]
        return [] if powerful else [f"no sampled token was tested; {'raise --samples' if tests else reference}"]

    def _speculation(self, before: tuple[int, int] | None) -> dict[str, int] | None:
        after = self.endpoint.speculated()
        if before is None or after is None:
            self.remarks.append("the endpoint does not count draft tokens: whether it drafted is not known")
            return None
        return {"drafted": after[0] - before[0], "accepted": after[1] - before[1]}

    @property
    def _reference(self) -> str:
        if self.target is not None:
            return f"outpace's target {self.target.name} ({self.target.info.get('dtype', 'its own precision')})"
        if self.baseline is None:
            return "the endpoint's own log-probabilities"
        if is_itself(self.baseline):
            return "the same server without speculation"
        return self.baseline.server.url

    @property
    def _logprobs(self) -> dict[str, Any] | None:
        if not self.endpoint.top_logprobs:
            return None
        kind = {True: "raw", False: "processed", None: "unknown"}[self.endpoint.raw]
        return {"kind": kind, "top": self.endpoint.top_logprobs}


def _all(found: dict[int, list[Answer]]) -> list[Answer]:
    return [one for answers in found.values() for one in answers]
