"""From a prompt and options to Requests: methods built, lengths and stops settled, seeds drawn."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from outpace.api.chosen import Chosen, choose
from outpace.api.options import with_options
from outpace.api.prompt_forms import Prompt, read_prompts
from outpace.api.result import Result, results
from outpace.constraints.compiler import compiled
from outpace.controllers.registry import ControllerChoice
from outpace.core.errors import BadInput, shown
from outpace.core.files import version_at
from outpace.core.lru import Lru
from outpace.core.sampling import SamplingParams
from outpace.core.text import Tokenizer
from outpace.core.turns import ROUNDS
from outpace.engine.best_of import best_of
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.populations.beam_options import BeamOptions
from outpace.engine.populations.group import check_memory
from outpace.engine.request import Generation, Request
from outpace.engine.shared_decoder import SharedDecoder
from outpace.methods.default_method import DEFAULT_METHOD
from outpace.methods.named_weights import DraftModels, Heads
from outpace.methods.registry import Context, build, find
from outpace.models.base import ChatTokenizer
from outpace.targets.base import Target

MOST_SAMPLES = 65_536
"""Of one prompt: each is a request, and all are made before the first runs."""


class LoadedModel(Protocol):
    """The parts of a :class:`~outpace.model.Model` that answering needs."""

    @property
    def target(self) -> Target: ...

    @property
    def tokenizer(self) -> ChatTokenizer: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def learned(self) -> Lru[Any, tuple[Context, Method]]: ...

    @property
    def shared(self) -> SharedDecoder: ...

    def method(
        self,
        name: str | Method,
        settings: Mapping[str, Any] | None = None,
        *,
        rule: Any = None,
        draft_model: DraftModels = None,
        datastore: str | Path | None = None,
        head: Heads = None,
        controller: str | ControllerChoice | None = None,
    ) -> Method: ...

    def context(
        self,
        *,
        draft_model: DraftModels = None,
        datastore: str | Path | None = None,
        head: Heads = None,
        controller: str | ControllerChoice | None = None,
    ) -> Context: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What one call asks for: ``each`` requests for each prompt, prompt by prompt, of which ``n`` answers are returned
    (None: one, not in a list). ``logprobs``: whether the caller wants them."""

    requests: list[Request]
    batch: bool
    n: int | None
    each: int = 1
    logprobs: bool = False

    def shaped(self, ended: Sequence[Generation], tokenizer: Tokenizer) -> Any:
        """The results of all requests as the caller expects them: alone, in a list, or in a list of lists."""
        prompts = [ended[at : at + self.each] for at in range(0, len(ended), self.each)]
        found = [self._results(of_one, tokenizer) for of_one in prompts]
        if self.n is None:
            return [of_one[0] for of_one in found] if self.batch else found[0][0]
        return found if self.batch else found[0]

    def _results(self, ended: Sequence[Generation], tokenizer: Tokenizer) -> list[Result]:
        """The answers to one prompt."""
        n, first = self.n or 1, ended[0]
        if first.request.beams is not None:
            return results(first, tokenizer, n)
        best = best_of(ended, n) if self.each > n else ended
        found = [one for generation in best for one in results(generation, tokenizer, 1)]
        return found if self.logprobs or self.each == n else [replace(one, logprobs=[]) for one in found]

    def named(self, at: int, error: BaseException) -> BaseException:
        """The error of one request; in a batch it says of which prompt."""
        prompts = len(self.requests) // self.each
        if not self.batch or prompts == 1 or not isinstance(error, BadInput):
            return error
        found = BadInput(f"prompt {at // self.each + 1} of {prompts}: {error}")
        found.__cause__ = error
        return found


def ask(model: LoadedModel, prompt: Prompt, n: int | None, options: Mapping[str, Any]) -> Asked:
    """Read, check and build everything before anything runs. Raises BadInput; in a batch it names the prompt."""
    chosen = choose(options)
    prompts = read_prompts(model.tokenizer, prompt, chosen.raw)
    method = build_method(model, chosen)
    chosen = _with_beams_of(method, chosen)
    each = _requests_each(n, chosen)
    references = read_references(model, chosen)
    decoder = Decoder(model.target, model.tokenizer)
    requests: list[Request] = []
    asked = Asked(requests, prompts.batch, n, each, chosen.params.logprobs is not False)
    for ids in prompts.ids:
        try:
            request = build_request(model, chosen, method, references, ids)
            decoder.check(request)
        except BadInput as error:
            if len(prompts.ids) == 1:
                raise
            raise BadInput(f"prompt {len(requests) // each + 1} of {len(prompts.ids)}: {error}") from error
        requests += samples(request, 0, each)
    at_once = requests[: model.shared.limits.max_batch]
    groups = [(one, population) for one in at_once if (population := one.population) is not None]
    if len(groups) > 1:
        check_memory(groups, model.target)
    return asked


def build_request(
    model: LoadedModel, chosen: Chosen, method: Method, references: tuple[tuple[int, ...], ...], ids: Sequence[int]
) -> Request:
    """The request for one prompt. Raises BadInput for a prompt that leaves no room under ``max_length``, and for a
    grammar that cannot be used."""
    params = _seeded(chosen.params)
    if chosen.best_of is not None:  # the best is found by them
        params = replace(params, logprobs=True)
    if chosen.grammar is not None:
        params = replace(params, constraint=compiled(chosen.grammar, model.tokenizer, chosen.grammar_limits))
    return Request(
        prompt=tuple(ids),
        method=method,
        params=params,
        max_new_tokens=_length(chosen, len(ids)),
        stop_ids=chosen.stop_ids(model.eos_ids),
        stop_strings=chosen.stop,
        references=references,
        reference_texts=chosen.references,
        namespace=chosen.namespace,
        beams=chosen.beams,
    )


def read_references(model: LoadedModel, chosen: Chosen) -> tuple[tuple[int, ...], ...]:
    """Token ids of the texts that drafters may copy from."""
    return tuple(tuple(model.tokenizer.encode(text)) for text in chosen.references)


def build_method(model: LoadedModel, chosen: Chosen) -> Method:
    """The method that was chosen, in its turn: building one may measure the target."""
    if isinstance(chosen.method, Method):
        if chosen.choice is not None:
            raise BadInput("the method is built already, with its controller; give its name, or leave out controller")
        return chosen.method
    with ROUNDS:
        return _method(model, chosen)


def ask_one(model: LoadedModel, prompt: Prompt, options: Mapping[str, Any], what: str) -> Request:
    """A single request, for ``what`` takes one prompt at a time."""
    asked = ask(model, prompt, None, options)
    if asked.batch:
        raise BadInput(f"{what} takes one prompt, not a batch; call it for each, or use generate for all")
    if asked.each > 1:
        raise BadInput(f"best_of chooses among whole answers, and {what} decodes one; use generate")
    return asked.requests[0]


@with_options
def request(model: LoadedModel, prompt: Prompt, **options: Any) -> Request:
    """The Request that :func:`~outpace.api.calls.generate` runs, for those who run a Decoder themselves.

    Raises BadInput as it does.
    """
    return ask_one(model, prompt, options, "request")


def prompt_ids(model: LoadedModel, prompt: Prompt, raw: bool = False) -> list[int]:
    """Token ids of a single prompt. Raises BadInput for what is no prompt."""
    return read_prompts(model.tokenizer, prompt, raw).ids[0]


def _with_beams_of(method: Method, chosen: Chosen) -> Chosen:
    """With the beams that the method decodes. Raises BadInput where it decodes a group of another kind."""
    if method.population is None:
        return chosen
    beams = BeamOptions(1) if chosen.one_beam else chosen.beams
    population = method.population(Request((), method, chosen.params, beams=beams))
    if chosen.best_of is not None:
        raise BadInput(
            f"best_of chooses among samples, and method '{method.name}' decodes {population.called}; leave it out"
        )
    return replace(chosen, beams=population.beams)


def _requests_each(n: Any, chosen: Chosen) -> int:
    """How many requests a prompt has of which ``n`` answers are asked for. Raises BadInput for what contradicts."""
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise BadInput(f"n must be a whole number of samples, at least 1, not {shown(n)}")
    count, most, beams, greedy = n or 1, chosen.best_of, chosen.beams, chosen.params.greedy
    for name, many in (("n", count), ("best_of", most or 1)):
        if many > MOST_SAMPLES:
            raise BadInput(f"{name} must be at most {MOST_SAMPLES:,}, not {many:,}; ask several times")
    if beams is not None:
        if most is not None:
            raise BadInput("best_of chooses among samples, and num_beams among beams; give one of them")
        if count > beams.num_beams:
            raise BadInput(f"n={count} answers of num_beams={beams.num_beams}: a beam gives one; raise num_beams")
        return 1
    if most is not None and most < count:
        raise BadInput(f"best_of={most} is less than n={count}: the best are chosen among more")
    if max(count, most or 1) > 1 and greedy:
        name, many = ("n", count) if most is None else ("best_of", most)
        raise BadInput(
            f"{name}={many} at temperature 0 would give one answer {many} times; give temperature=1.0, or leave out "
            f"{name}"
        )
    return most or count


def _length(chosen: Chosen, prompt: int) -> int:
    if chosen.max_length is None:
        return chosen.max_new_tokens
    if chosen.max_length <= prompt:
        raise BadInput(
            f"max_length={chosen.max_length} counts the prompt's tokens too, and it has {prompt}; raise it, or give "
            "max_new_tokens"
        )
    return chosen.max_length - prompt


def _seeded(params: SamplingParams) -> SamplingParams:
    """A sampled request that names no seed draws one, so that its answer can be repeated."""
    if params.greedy or params.seed is not None:
        return params
    return replace(params, seed=secrets.randbits(32))


def samples(request: Request, first: int, count: int) -> list[Request]:
    """Samples ``first`` to ``first + count - 1`` of one prompt, whose K/V they share."""
    if count > 1:
        request = replace(request, siblings=object())
    return [_sample(request, number) for number in range(first, first + count)]


def _sample(request: Request, number: int) -> Request:
    """The samples of one prompt have consecutive seeds, so that one seed repeats them all."""
    if number == 0 or request.params.greedy:
        return request
    return replace(request, params=replace(request.params, seed=request.params.fixed_seed + number))


def _method(model: LoadedModel, chosen: Chosen) -> Method:
    named: dict[str, Any] = {
        "draft_model": chosen.draft_model,
        "datastore": chosen.datastore,
        "head": chosen.head,
        "controller": chosen.choice,
    }
    assert isinstance(chosen.method, str)
    # What drafts for one sequence does not draft for beams; the method that nobody had to name then drafts nothing.
    name = "none" if chosen.beams is not None and find(chosen.method).name == DEFAULT_METHOD else chosen.method
    return _remembered(model, name, chosen, model.context(**named))


def _remembered(model: LoadedModel, name: str, chosen: Chosen, context: Context) -> Method:
    """The method as it was built for an earlier request: loading a head takes as long as a short answer, and what
    namespaces have learned is kept in it."""
    store = None if chosen.datastore is None else (str(chosen.datastore), version_at(Path(chosen.datastore)))
    weights = tuple((one.kind, one.name, one.key) for one in context.bindings.named)
    rule = chosen.rule if chosen.rule is None or isinstance(chosen.rule, str) else repr(chosen.rule)
    choice = chosen.choice
    controller = choice and (choice.name, repr(sorted(choice.settings.items())))
    key = (name, repr(sorted(chosen.settings.items())), rule, store, weights, controller)
    known = model.learned.get(key)
    if known is None:
        # The context keeps the draft models, so that their ids stay theirs.
        known = context, build(name, context, chosen.settings, chosen.rule)
        model.learned.put(key, known)
    return known[1]
