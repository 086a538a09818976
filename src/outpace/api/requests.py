"""From a prompt and options to Requests: methods built, lengths and stops settled, seeds drawn."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from outpace.api.chosen import Chosen, choose
from outpace.api.options import with_options
from outpace.api.prompt_forms import Prompt, read_prompts
from outpace.constraints.compiler import compiled
from outpace.controllers.registry import ControllerChoice
from outpace.core.errors import BadInput, shown
from outpace.core.lru import Lru
from outpace.core.sampling import SamplingParams
from outpace.core.turns import ROUNDS
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.engine.shared_decoder import SharedDecoder
from outpace.methods.named_weights import DraftModels, Heads
from outpace.methods.registry import Context, build
from outpace.models.base import ChatTokenizer
from outpace.targets.base import Target

T = TypeVar("T")


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
    """What one call asks for: a request for each sample of each prompt, prompt by prompt."""

    requests: list[Request]
    batch: bool
    n: int | None

    def shaped(self, results: Sequence[T]) -> Any:
        """One result for each request, as the caller expects them: alone, in a list, or in a list of lists."""
        if self.n is None:
            return list(results) if self.batch else results[0]
        groups = [list(results[at : at + self.n]) for at in range(0, len(results), self.n)]
        return groups if self.batch else groups[0]

    def named(self, at: int, error: BaseException) -> BaseException:
        """The error of one request; in a batch it says of which prompt."""
        prompts = len(self.requests) // (self.n or 1)
        if not self.batch or prompts == 1 or not isinstance(error, BadInput):
            return error
        found = BadInput(f"prompt {at // (self.n or 1) + 1} of {prompts}: {error}")
        found.__cause__ = error
        return found


def ask(model: LoadedModel, prompt: Prompt, n: int | None, options: Mapping[str, Any]) -> Asked:
    """Read, check and build everything before anything runs. Raises BadInput; in a batch it names the prompt."""
    chosen = choose(options)
    if n is not None:
        _check_samples(n, chosen.params)
    prompts = read_prompts(model.tokenizer, prompt, chosen.raw)
    method = build_method(model, chosen)
    references = read_references(model, chosen)
    decoder = Decoder(model.target, model.tokenizer)
    requests: list[Request] = []
    asked = Asked(requests, prompts.batch, n)
    for ids in prompts.ids:
        try:
            request = build_request(model, chosen, method, references, ids)
            decoder.check(request)
        except BadInput as error:
            if len(prompts.ids) == 1:
                raise
            raise BadInput(f"prompt {len(requests) // (n or 1) + 1} of {len(prompts.ids)}: {error}") from error
        requests += [sample(request, number) for number in range(n or 1)]
    return asked


def build_request(
    model: LoadedModel, chosen: Chosen, method: Method, references: tuple[tuple[int, ...], ...], ids: Sequence[int]
) -> Request:
    """The request for one prompt. Raises BadInput for a prompt that leaves no room under ``max_length``, and for a
    grammar that cannot be used."""
    params = _seeded(chosen.params)
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
        namespace=chosen.namespace,
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


def _check_samples(n: Any, params: SamplingParams) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise BadInput(f"n must be a whole number of samples, at least 1, not {shown(n)}")
    if n > 1 and params.greedy:
        raise BadInput(f"n={n} at temperature 0 would give one answer {n} times; give temperature=1.0, or leave out n")


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


def sample(request: Request, number: int) -> Request:
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
    return _remembered(model, chosen.method, chosen, model.context(**named))


def _remembered(model: LoadedModel, name: str, chosen: Chosen, context: Context) -> Method:
    """The method as it was built for an earlier request: loading a head takes as long as a short answer, and what
    namespaces have learned is kept in it."""
    store = None if chosen.datastore is None else (str(chosen.datastore), _changed(chosen.datastore))
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


def _changed(file: str | Path) -> int | None:
    path = Path(file)
    return path.stat().st_mtime_ns if path.exists() else None  # what is not there is refused in words, later
