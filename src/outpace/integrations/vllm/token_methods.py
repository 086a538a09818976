"""The methods that draft from tokens alone, built for an engine that shows nothing else of its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from outpace.core.errors import BadInput
from outpace.integrations.vllm.proposer_options import ProposerOptions
from outpace.methods.default_method import DEFAULT_METHOD

if TYPE_CHECKING:
    from outpace.drafting.base import Drafter
    from outpace.targets.costs import Costs

TOKEN_METHODS = ("sam", "pld", "recycling", "cacheback", "rest", "cascade", "merge", DEFAULT_METHOD)


class TokenTarget:
    """What these methods ask of a target: fixed costs, for the plug-in has its own, and the size of the vocabulary."""

    context_length = 2**31

    def __init__(self, vocab_size: int) -> None:
        from outpace.targets.costs import FixedCosts

        self.vocab_size = vocab_size
        self.costs: Costs = FixedCosts()


def build_drafter(options: ProposerOptions, vocab_size: int) -> Drafter[Any]:
    """The drafter of a method, drafting single paths. Raises BadInput for a method or setting that does not run here,
    and for a datastore that cannot be opened."""
    from outpace.drafting.best_first import BestFirst
    from outpace.drafting.combination import Combined
    from outpace.drafting.merged import MergedTrees
    from outpace.methods.registry import Context, canonical, configured, find
    from outpace.targets.base import Target

    name = canonical(options.method)
    if name not in TOKEN_METHODS:
        raise BadInput(f"method '{name}' does not draft from tokens alone; these do: {', '.join(TOKEN_METHODS)}")
    info = find(name)
    settings = {**options.settings, **({"learned": []} if name == DEFAULT_METHOD else {})}
    target = cast(Target, TokenTarget(vocab_size))
    if options.datastore is None:
        context = Context(target)
    else:
        from outpace.datastore.store import open_datastore

        datastore = open_datastore(Path(options.datastore))
        context = Context(target, datastore=lambda: datastore)
    drafter = info.build(context, configured(info, settings)).drafter
    waiting: list[Drafter[Any]] = [drafter]
    while waiting:
        one = waiting.pop()
        if one.proposal.sampled or one.needs_target_internals or one.aux_hidden_state_layers:
            raise BadInput(f"method '{name}': one of its parts needs more of the model than vLLM shows")
        if isinstance(one, BestFirst | MergedTrees):
            one.single_path = True
        if isinstance(one, Combined):
            waiting.extend(one.parts)
    return drafter
