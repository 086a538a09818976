"""What outpace's methods are in vLLM: ``speculative_config`` for a head, a draft model, or a lookup method.

eagle3, dflash, medusa (and their heads)   vLLM's methods of these names
draft-lm, draft-model                      draft_model
pld, sam                                   vLLM's own ngram and suffix, or outpace's in the plug-in
recycling, cacheback, rest, cascade, ...   outpace's, in the plug-in (custom_class)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outpace.core.errors import BadInput
from outpace.heads.shipped import find_head
from outpace.integrations.vllm.exported_head import LAYOUTS, exported
from outpace.integrations.vllm.interpreter import Interpreter
from outpace.integrations.vllm.measured_length import DraftLength, measured_length
from outpace.integrations.vllm.proposer_options import ProposerOptions
from outpace.integrations.vllm.token_methods import TOKEN_METHODS
from outpace.methods.default_method import DEFAULT_METHOD
from outpace.methods.registry import canonical, configured, drafting_with, find, present_names

if TYPE_CHECKING:
    from outpace.heads.head_folder import HeadFolder
    from outpace.model import Model

CUSTOM_CLASS = "outpace.integrations.vllm.Proposer"
PROPOSERS = ("auto", "vllm", "outpace")
EXAMPLES = "vLLM's own examples"
"""Where the draft lengths of its lookup methods come from."""
_NGRAM_LENGTH, _SUFFIX_LENGTH, _PLUGIN_LENGTH, _DRAFT_MODEL_LENGTH = 5, 32, 16, 3
_AS_IN_VLLM = {"eagle3": "eagle3", "dflash": "dflash", "medusa": "medusa", "draft-lm": "draft_model"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asked for. ``proposer``: whose implementation drafts for pld and sam, "auto": vLLM's where it has
    one. ``draft_folder``: finds a draft model's weights as vLLM takes them. ``model``: the name that the user gave."""

    method: str = DEFAULT_METHOD
    settings: Mapping[str, Any] = field(default_factory=dict)
    head: str | None = None
    draft_model: str | None = None
    num_draft_tokens: int | None = None
    proposer: str = "auto"
    datastore: str | None = None
    draft_folder: Callable[[str], str] = str
    model: str = ""


@dataclass(frozen=True, slots=True)
class Speculation:
    """``method`` of outpace, and ``config``, vLLM's speculative_config; None: no speculation.

    ``plugin``: what the plug-in reads. ``length_source``: where the draft length comes from. ``notes``: lines for the
    user.
    """

    method: str
    config: dict[str, Any] | None = None
    plugin: ProposerOptions | None = None
    length_source: str = ""
    notes: tuple[str, ...] = ()


def speculation(wanted: Wanted, model: Callable[[], Model], served: str, interpreter: Interpreter) -> Speculation:
    """vLLM's configuration. ``model``: loads it, for its heads; ``served``: the folder or hub id that vLLM serves.

    Raises BadInput for what vLLM and the plug-in cannot draft with.
    """
    if wanted.proposer not in PROPOSERS:
        raise BadInput(f"--proposer must be one of {', '.join(PROPOSERS)}, not {wanted.proposer}")
    name = canonical(wanted.method)
    if wanted.head is not None:
        head = find_head(wanted.head, model, wanted.model)
        kind = find(name).head
        if name != DEFAULT_METHOD and kind != head.kind:
            takes = f"drafts with heads of kind {kind}" if kind else "drafts without a head"
            raise BadInput(f"--head {wanted.head} is of kind {head.kind}, but method '{name}' {takes}; leave out one")
        return _with_head(head, wanted, model, served)
    if wanted.draft_model is not None and name not in (DEFAULT_METHOD, "draft-model"):
        raise BadInput(f"--draft-model: method '{name}' drafts without a draft model; leave out one")
    if wanted.draft_model is not None or name == "draft-model":
        return _with_draft_model(wanted.draft_model or "draft-lm", wanted, model, served)
    if name == "none":
        return Speculation("none")
    if name == DEFAULT_METHOD and wanted.proposer != "outpace":
        return _best_offered(wanted, model, served, interpreter)
    if (kind := find(name).head) is not None:
        return _with_head(find_head(kind, model, wanted.model), wanted, model, served)
    return _lookup(name, wanted, model, interpreter)


def _with_head(head: HeadFolder, wanted: Wanted, model: Callable[[], Model], served: str) -> Speculation:
    ready = exported(head, model, served, wanted.model)
    length = _length(wanted, measured_length(head))
    config = head_config(head.kind, str(ready.folder), length.tokens)
    return Speculation(head.kind, config, None, length.source, ready.notes)


def head_config(kind: str, folder: str, tokens: int) -> dict[str, Any]:
    """vLLM's configuration for a head of one of its :data:`LAYOUTS` that was exported to ``folder``."""
    return {"method": _AS_IN_VLLM[kind], "model": folder, "num_speculative_tokens": tokens, **_sampled(kind)}


def _sampled(kind: str) -> dict[str, str]:
    """Above temperature 0 draft tokens are drawn from the head's distribution, which accepts more of them than the
    likeliest alone; greedy requests draft the likeliest either way. Medusa's heads draft the likeliest in vLLM."""
    return {} if kind == "medusa" else {"draft_sample_method": "probabilistic"}


def _with_draft_model(named: str, wanted: Wanted, model: Callable[[], Model], served: str) -> Speculation:
    from outpace.methods.named_weights import DRAFT_LM, draft_lm_folder

    if named == DRAFT_LM or draft_lm_folder(named) is not None:
        return _with_head(find_head(named, model, wanted.model), wanted, model, served)
    length = _length(wanted, DraftLength(_DRAFT_MODEL_LENGTH, "not measured with this draft model"))
    config = head_config("draft-lm", wanted.draft_folder(named), length.tokens)
    return Speculation("draft-model", config, None, length.source)


def _best_offered(wanted: Wanted, model: Callable[[], Model], served: str, interpreter: Interpreter) -> Speculation:
    """The shipped head that has measured best; where none is shipped, the suffix automaton."""
    from outpace.heads.shipped import measured, shipped

    offered = [
        (measured(head, drafting_with(head.kind)[0]) or 0.0, head)
        for head in shipped(model().target)
        if head.kind in LAYOUTS
    ]
    speed, head = max(offered, key=lambda one: one[0], default=(0.0, None))
    if head is None or speed <= 1.0:
        return _lookup("sam", wanted, model, interpreter)
    return _with_head(head, wanted, model, served)


def _lookup(name: str, wanted: Wanted, model: Callable[[], Model], interpreter: Interpreter) -> Speculation:
    """A method that drafts from tokens alone: vLLM's own where it has it, or outpace's in the plug-in."""
    if wanted.datastore is not None:
        from outpace.datastore.store import open_datastore

        open_datastore(wanted.datastore, model().tokenizer.fingerprint)
    settings = _settings(name, wanted)
    own = {"pld": _ngram, "sam": _suffix}.get(name)
    has_own = own is not None and (name != "sam" or interpreter.suffix or interpreter.version is None)
    if wanted.proposer == "vllm" and not has_own:
        why = "needs arctic-inference in that environment" if own else "is not in vLLM"
        raise BadInput(f"--proposer vllm: method '{name}' {why}; leave out --proposer, or name outpace")
    if own is not None and has_own and wanted.proposer != "outpace" and wanted.datastore is None:
        return own(settings, wanted)
    if name not in TOKEN_METHODS:
        raise BadInput(
            f"method '{name}' does not run in vLLM; these do: {', '.join(LAYOUTS)}, draft-model, "
            f"{', '.join(TOKEN_METHODS)}, none"
        )
    if "datastore" in find(name).needs and wanted.datastore is None:
        raise BadInput(f"method '{name}' copies from a datastore: give --datastore PATH")
    length = _length(
        wanted, DraftLength(_PLUGIN_LENGTH, "most of a round; the plug-in drafts as many as gain"), settings
    )
    plugin = ProposerOptions(method=name, settings=settings, datastore=wanted.datastore)
    config = {"method": "custom_class", "model": CUSTOM_CLASS, "num_speculative_tokens": length.tokens}
    notes = ("vLLM runs a custom_class with its V1 model runner and without asynchronous scheduling",)
    return Speculation(name, config, plugin, length.source, notes)


def _settings(name: str, wanted: Wanted) -> dict[str, Any]:
    """The settings of a method that were given, as values of their types. Raises BadInput for wrong ones."""
    info = find(name)
    return configured(info, present_names(info, wanted.settings)).model_dump(mode="json", exclude_unset=True)


def _ngram(settings: Mapping[str, Any], wanted: Wanted) -> Speculation:
    _only(settings, ("num_draft_tokens", "min_ngram", "max_ngram"), "pld")
    whole = configured(find("pld"), settings).model_dump()
    length = _length(wanted, DraftLength(_NGRAM_LENGTH, EXAMPLES), settings)
    config = {
        "method": "ngram",
        "num_speculative_tokens": length.tokens,
        "prompt_lookup_min": whole["min_ngram"],
        "prompt_lookup_max": whole["max_ngram"],
    }
    return Speculation("pld", config, None, length.source)


def _suffix(settings: Mapping[str, Any], wanted: Wanted) -> Speculation:
    _only(settings, ("num_draft_tokens",), "sam")
    length = _length(wanted, DraftLength(_SUFFIX_LENGTH, EXAMPLES), settings)
    return Speculation("sam", {"method": "suffix", "num_speculative_tokens": length.tokens}, None, length.source)


def _only(settings: Mapping[str, Any], known: tuple[str, ...], method: str) -> None:
    stray = next((key for key in settings if key not in known), None)
    if stray is not None:
        raise BadInput(f"--param {stray}: vLLM's own {method} has no such setting; add --proposer outpace")


def _length(wanted: Wanted, otherwise: DraftLength, settings: Mapping[str, Any] | None = None) -> DraftLength:
    """The draft length that was asked for, or the one that is known to suit."""
    asked = wanted.num_draft_tokens
    if asked is None:
        known = _settings(wanted.method, wanted) if settings is None else settings
        asked = next((int(known[key]) for key in ("num_draft_tokens", "max_nodes") if known.get(key)), None)
    if asked is None:
        return otherwise
    if asked < 1:
        raise BadInput(
            f"--num-draft-tokens must be a whole number of at least 1, not {asked}; --method none drafts none"
        )
    return DraftLength(asked, "as asked for")
