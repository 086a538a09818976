"""What to type: the command of each engine for what was advised, or why it has none.

A line that begins with ``#`` is no command but the reason. Each engine gets the best of what it can run: vLLM and
llama.cpp draft chains, SGLang trees of EAGLE heads too, and only outpace chooses lengths in every round. A GGUF file
is converted for vLLM by outpace's own command. llama.cpp's options are those since May 2026 (its pull requests 22397
and 22964).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from outpace.advice.candidates import ENGINES, Shape
from outpace.advice.recommendation import WORTH
from outpace.core.errors import BadInput
from outpace.heads.exchange import published
from outpace.integrations.vllm.exported_head import LAYOUTS
from outpace.integrations.vllm.interpreter import Interpreter
from outpace.integrations.vllm.speculative_config import Wanted, head_config, speculation
from outpace.methods.bindings import split
from outpace.methods.named_weights import DRAFT_LM, draft_lm_folder, name_and_rest
from outpace.methods.registry import find

_EAGLE = {"eagle": "EAGLE", "eagle3": "EAGLE3"}
"""SGLang's names of the heads that it drafts with, by kind."""
_EXPORTED = "HEAD_FOLDER"
"""Stands for the folder that ``outpace export-head`` is to write."""


@dataclass(frozen=True, slots=True)
class Typed:
    """What the user named: it is named again in the commands.

    ``heads``: as --head takes them, none where one is shipped. ``draft_models``: where each is, by name. ``machine``:
    the options under which outpace was measured, as words of a command. ``dtype``, ``threads``: of them, those that
    other engines take too; "" and None: what they choose themselves.
    """

    model: str = "smollm2"
    heads: Seq[str] = ()
    draft_models: Mapping[str, str] = field(default_factory=dict)
    machine: Seq[str] = ()
    dtype: str = ""
    threads: int | None = None

    @property
    def published(self) -> str:
        """The model as other engines find it."""
        return published(self.model)

    def draft_model(self, label: str) -> str | None:
        """Where the draft model of ``METHOD#NAME`` is; without a name that of the first one."""
        name = split(label)[1]
        return self.draft_models.get(name) if name else next(iter(self.draft_models.values()), None)


@dataclass(frozen=True, slots=True)
class Offer:
    """A shape that an engine may be told to draft at a batch: its ``speedup``, and the ``lower`` end of its interval.
    ``head``: the folder of its head."""

    method: str
    shape: Shape
    speedup: float
    lower: float
    head: str | None = None
    batch: int = 1


def commands(typed: Typed, advised: Offer | None, offers: Seq[Offer]) -> dict[str, str]:
    """The command of each engine: for the best that it can run, where that is sure to gain.

    ``advised``: what outpace gets, with the batch that it is for; None where autoregressive decoding is. Other engines
    get the best of ``offers`` at that batch, or at the next one at which they can run something that gains.
    """
    smallest = min((one.batch for one in offers), default=1)
    found = {}
    for engine in ENGINES:
        able: list[Offer] = []
        if advised is not None and engine == "outpace":
            able = [advised]
        elif advised is not None:
            able = [one for one in offers if engine in one.shape.engines and one.lower > WORTH]
            able = [one for one in able if one.batch >= advised.batch]
        best, command = _first_written(engine, typed, sorted(able, key=lambda one: (one.batch, -one.speedup)))
        if best is not None and best.batch > smallest and not command.startswith("#"):
            command += f"  # for batch {best.batch}: nothing is sure to gain at smaller ones"
        found[engine] = command
    return found


def _first_written(engine: str, typed: Typed, offers: Seq[Offer]) -> tuple[Offer | None, str]:
    """The first of the offers for which the engine has a command; where it has none, the reason for the first one."""
    choices: Seq[Offer | None] = offers or [None]
    lines = [(one, _WRITERS[engine](typed, one)) for one in choices]
    return next((pair for pair in lines if not pair[1].startswith("#")), lines[0])


def _outpace(typed: Typed, best: Offer | None) -> str:
    words = ["outpace", "serve", "--model", typed.model, *typed.machine]
    words += ["--method", "none" if best is None else best.method]
    if best is not None:
        info = find(best.method)
        if info.takes("head"):
            own = [one for one in typed.heads if name_and_rest(one)[1] == best.head]
            for one in own or typed.heads:
                words += ["--head", one]
        if info.takes("draft model"):
            bound = split(best.method)[1]
            for name, place in typed.draft_models.items():
                if bound in ("", name):
                    words += ["--draft-model", place if name in (place, DRAFT_LM) else f"{name}={place}"]
        for key, value in best.shape.settings.items():
            words += ["--param", f"{best.method}.{key}={value}"]
    return shlex.join(words)


def _vllm(typed: Typed, best: Offer | None) -> str:
    if best is None:
        words = ["outpace", "serve", "--engine", "vllm", "--model"] if _gguf(typed) else ["vllm", "serve"]
        return _nothing("vLLM", shlex.join([*words, typed.published, *_dtype(typed)]))
    kind = find(best.method).head
    if kind is not None:
        if kind not in LAYOUTS:
            return f"# vLLM does not draft with heads of kind {kind}"
        config: Mapping[str, Any] | None = head_config(kind, _EXPORTED, best.shape.chain)
    else:
        draft = _draft_model(typed, best)
        if draft is not None and _draft_lm(draft):
            return _exported_draft_lm(typed, best, draft)
        if draft is not None:
            wanted = Wanted("draft-model", draft_model=draft, num_draft_tokens=best.shape.chain)
        else:
            wanted = Wanted(best.method, num_draft_tokens=best.shape.chain, proposer="vllm")
        try:
            found = speculation(wanted, _no_model, typed.published, Interpreter("python", None))
        except BadInput as error:
            return f"# vLLM: {error}"
        config = found.config
    return _vllm_serve(typed, best, config, _export(typed, best.head, LAYOUTS.get(kind or "", "")))


def _sglang(typed: Typed, best: Offer | None) -> str:
    words = ["python", "-m", "sglang.launch_server", "--model-path", typed.published]
    if best is None:
        return _nothing("SGLang", shlex.join(words))
    kind, settings = find(best.method).head, best.shape.settings
    if kind is not None:
        if kind not in _EAGLE:
            return f"# SGLang does not draft with heads of kind {kind}"
        chain = best.shape.chain
        topk = 1 if chain else settings.get("topk", find(best.method).settings.model_fields["topk"].default)
        words += ["--speculative-algorithm", _EAGLE[kind], "--speculative-draft-model-path", _EXPORTED]
        words += ["--speculative-num-steps", str(settings["depth"]), "--speculative-eagle-topk", str(topk)]
        # The root counts among SGLang's draft tokens.
        words += ["--speculative-num-draft-tokens", str(1 + (chain or settings["max_nodes"]))]
    elif (draft := _draft_model(typed, best)) is not None:
        if _draft_lm(draft):
            return f"# SGLang does not draft with the draft LM '{draft}'; name a model with --draft-model"
        words += ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft]
        words += ["--speculative-num-steps", str(best.shape.chain), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(1 + best.shape.chain)]
    else:
        words += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(1 + best.shape.chain)]
    return shlex.join(words) + _export(typed, best.head, "eagle")


def _llama_cpp(typed: Typed, best: Offer | None) -> str:
    words = ["llama-server", "-m", typed.published]
    if not _gguf(typed):
        return "# llama.cpp reads GGUF files: give --model a .gguf file for its command"
    words += [] if typed.threads is None else ["-t", str(typed.threads)]
    if best is None:
        return _nothing("llama.cpp", shlex.join(words))
    words += ["-np", str(best.batch)]
    if (draft := _draft_model(typed, best)) is not None:
        if not draft.endswith(".gguf"):
            return "# llama.cpp reads GGUF files: give --draft-model a .gguf file for its command"
        words += ["--spec-type", "draft-simple", "-md", draft, "--spec-draft-n-max", str(best.shape.chain)]
        words += ["--spec-draft-n-min", "0", "--spec-draft-p-min", "0"]
        return shlex.join(words)
    longest = find(best.method).settings.model_fields["max_ngram"].default
    matched = min(longest, best.shape.chain)  # it drafts nothing that is shorter than what it has matched
    words += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(matched)]
    words += ["--spec-ngram-simple-size-m", str(best.shape.chain)]
    return f"{shlex.join(words)}  # it copies after {matched} equal tokens; measured was after 1 to {longest}"


def _draft_model(typed: Typed, best: Offer) -> str | None:
    """Where the draft model of ``draft-model`` is; None for other methods."""
    if split(best.method)[0] != "draft-model":
        return None
    return published(typed.draft_model(best.method) or DRAFT_LM)


def _draft_lm(place: str) -> bool:
    """Whether it is a head of kind ``draft-lm``, which is in outpace's own layout."""
    return place == DRAFT_LM or draft_lm_folder(place) is not None


def _exported_draft_lm(typed: Typed, best: Offer, place: str) -> str:
    config = head_config(DRAFT_LM, _EXPORTED, best.shape.chain)
    return _vllm_serve(typed, best, config, _export(typed, place, LAYOUTS[DRAFT_LM]))


def _vllm_serve(typed: Typed, best: Offer, config: Mapping[str, Any] | None, before: str) -> str:
    """``before``: what is to be run first, as a comment."""
    if not _gguf(typed) and not _gguf_draft(typed, best):
        words = ["vllm", "serve", typed.published, *_dtype(typed), "--speculative-config", json.dumps(config)]
        return shlex.join(words) + before
    # vLLM is given a folder that outpace converts the file to; heads are exported on the way.
    words = ["outpace", "serve", "--engine", "vllm", "--model", typed.published, *_dtype(typed)]
    draft = _draft_model(typed, best)
    if best.head is not None or (draft is not None and _draft_lm(draft)):
        words += ["--head", best.head or str(draft)]
    else:
        words += ["--method", split(best.method)[0], *([] if draft is None else ["--draft-model", draft])]
    words += ["--num-draft-tokens", str(best.shape.chain)]
    return f"{shlex.join(words)}  # converts GGUF files, then runs vllm serve with a --speculative-config"


def _gguf(typed: Typed) -> bool:
    return typed.published.endswith(".gguf")


def _gguf_draft(typed: Typed, best: Offer) -> bool:
    return (_draft_model(typed, best) or "").endswith(".gguf")


def _dtype(typed: Typed) -> list[str]:
    return ["--dtype", typed.dtype] if typed.dtype else []


def _nothing(engine: str, command: str) -> str:
    return f"{command}  # without speculation: {engine} can run nothing that is sure to gain"


def _export(typed: Typed, head: str | None, layout: str) -> str:
    if head is None:
        return ""
    words = ["outpace", "export-head", head, "--layout", layout, "--model", typed.model, "--out", _EXPORTED]
    return f"  # before: {shlex.join(words)}"


def _no_model() -> Any:
    raise BadInput("its configuration needs the model")


_WRITERS = {"outpace": _outpace, "vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama_cpp}
