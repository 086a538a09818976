"""What to type: the command of each engine for what was advised, or why it has none.

A line that begins with ``#`` is no command but the reason. Each engine gets the best of what it can run: vLLM and
llama.cpp draft chains, SGLang trees of EAGLE heads too, and only outpace chooses lengths in every round.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from outpace.advice.candidates import ENGINES, Shape
from outpace.advice.recommendation import WORTH
from outpace.core.errors import BadInput
from outpace.heads.exchange import HUB
from outpace.integrations.vllm.exported_head import LAYOUTS
from outpace.integrations.vllm.interpreter import Interpreter
from outpace.integrations.vllm.speculative_config import Wanted, speculation
from outpace.methods.registry import find

_EAGLE = {"eagle": "EAGLE", "eagle2": "EAGLE", "eagle3": "EAGLE3"}
"""SGLang's names of the heads that it drafts with."""
_EXPORTED = "HEAD_FOLDER"
"""Stands for the folder that ``outpace export-head`` is to write."""


@dataclass(frozen=True, slots=True)
class Typed:
    """What the user named: it is named again in the commands. ``head``: its folder; None where one is shipped."""

    model: str = "smollm2"
    head: str | None = None
    draft_model: str | None = None

    @property
    def published(self) -> str:
        """The model as other engines find it."""
        return HUB.get(self.model, self.model)


@dataclass(frozen=True, slots=True)
class Offer:
    """A shape that an engine may be told to draft; ``head``: the folder of its head."""

    method: str
    shape: Shape
    speedup: float
    head: str | None = None


def commands(typed: Typed, method: str, offers: Seq[Offer]) -> dict[str, str]:
    """The command of each engine: for the best that it can run, where that is expected to gain.

    ``method``: what is advised, which outpace gets; "none" where nothing is.
    """
    found = {}
    ranked = sorted(offers, key=lambda one: -one.speedup)
    for engine in ENGINES:
        able = [one for one in ranked if engine in one.shape.engines and one.speedup > WORTH]
        if engine == "outpace":
            able = [one for one in able if one.method == method]
        # Where the method chooses by itself, and that is as good, there is less to type.
        found[engine] = _WRITERS[engine](typed, able[0] if able and method != "none" else None)
    return found


def _outpace(typed: Typed, best: Offer | None) -> str:
    words = ["outpace", "serve", "--model", typed.model, "--method", "none" if best is None else best.method]
    if best is not None:
        info = find(best.method)
        if typed.head is not None and info.takes("head"):
            words += ["--head", typed.head]
        if typed.draft_model is not None and info.takes("draft model"):
            words += ["--draft-model", typed.draft_model]
        for key, value in best.shape.settings.items():
            words += ["--param", f"{best.method}.{key}={value}"]
    return shlex.join(words)


def _vllm(typed: Typed, best: Offer | None) -> str:
    if best is None:
        return _nothing("vLLM", f"vllm serve {shlex.quote(typed.published)}")
    kind = find(best.method).head
    if kind is not None:
        if kind not in LAYOUTS:
            return f"# vLLM does not draft with heads of kind {kind}"
        config: Mapping[str, Any] | None = {
            "method": kind,
            "model": _EXPORTED,
            "num_speculative_tokens": best.shape.chain,
        }
    else:
        wanted = Wanted(best.method, draft_model=typed.draft_model, num_draft_tokens=best.shape.chain)
        if best.method != "draft-model":
            wanted = Wanted(best.method, num_draft_tokens=best.shape.chain, proposer="vllm")
        try:
            found = speculation(wanted, _no_model, typed.published, Interpreter("python", None))
        except BadInput as error:
            return f"# vLLM: {error}"
        config = found.config
    return (
        f"vllm serve {shlex.quote(typed.published)} --speculative-config {shlex.quote(json.dumps(config))}"
        + _export(typed, best.head, LAYOUTS.get(kind or "", ""))
    )


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
    elif best.method == "draft-model":
        words += ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(typed.draft_model)]
        words += ["--speculative-num-steps", str(best.shape.chain), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(1 + best.shape.chain)]
    else:
        words += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(1 + best.shape.chain)]
    return shlex.join(words) + _export(typed, best.head, "speculators")


def _llama_cpp(typed: Typed, best: Offer | None) -> str:
    words = ["llama-server", "-m", typed.published]
    if not typed.published.endswith(".gguf"):
        return "# llama.cpp reads GGUF files: give --model a .gguf file for its command"
    if best is None:
        return _nothing("llama.cpp", shlex.join(words))
    if best.method == "draft-model":
        if not str(typed.draft_model).endswith(".gguf"):
            return "# llama.cpp reads GGUF files: give --draft-model a .gguf file for its command"
        words += ["-md", str(typed.draft_model), "--draft-max", str(best.shape.chain), "--draft-min", "0"]
    else:
        words += ["--spec-type", "ngram-simple", "--draft-max", str(best.shape.chain)]
    return shlex.join(words)


def _nothing(engine: str, command: str) -> str:
    return f"{command}  # without speculation: {engine} can run nothing that is expected to gain"


def _export(typed: Typed, head: str | None, layout: str) -> str:
    if head is None:
        return ""
    words = ["outpace", "export-head", head, "--layout", layout, "--model", typed.model, "--out", _EXPORTED]
    return f"  # before: {shlex.join(words)}"


def _no_model() -> Any:
    raise BadInput("its configuration needs the model")


_WRITERS = {"outpace": _outpace, "vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama_cpp}
