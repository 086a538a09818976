"""Where a round's time goes, as a table and as the chart in docs/performance.md.

    python benchmarks/round_time.py --svg docs/round_time.svg

Plain decoding and a copying method, in two precisions, on prompts of the bench. The forward's parts are found by
leaving them out (sub-graph forwards over the rows of a mean round): attention with its projections, the MLPs, the LM
head; what is left of the kernels' time, and Python around them, is "rest of the forward".
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from time import perf_counter

import torch
from jinja2 import Environment

import outpace
from outpace.api.requests import request
from outpace.core.metrics import total
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.model import Model
from outpace.targets.sub_graph import FULL, SubGraph

PARTS = {
    "attention and its projections": "#2a7f7f",
    "MLPs": "#5fb3a1",
    "LM head": "#b7d9c8",
    "rest of the forward": "#8c8c8c",
    "draft": "#d98e04",
    "accept": "#b3543e",
    "other": "#cfcfcf",
}
QUESTION = "Summarise this in two sentences, then repeat the first one: "
TEXT = (
    "The library opens at nine and closes at six. On Mondays it stays shut. Books may be kept for three weeks, and "
    "longer when nobody else has asked for them. Children need a card of their own, which is free. "
)


def rounds(model: Model, method: str, length: int) -> tuple[float, float, dict[str, float]]:
    """Rows a round, milliseconds a round, and the phases' milliseconds a round."""
    found = []
    for number in range(4):
        decoder = Decoder(model.target, model.tokenizer)
        one = decoder.submit(
            request(model, QUESTION + TEXT * (number + 1), method=method, max_new_tokens=length, ignore_eos=True)
        )
        decoder.run()
        if number:  # the first warms up
            found.append(one.metrics)
    sums = total(found)
    phases = {name: 1e3 * spent / sums.rounds for name, spent in sums.phase_seconds.items()}
    return 1 + sums.drafted / sums.rounds, sum(phases.values()), phases


def forward_parts(model: Model, rows: int) -> dict[str, float]:
    """Milliseconds of a forward's parts, by leaving them out."""
    target = model.target
    layers = frozenset(range(target.num_layers))
    graphs = {
        "whole": FULL,
        "no attention": SubGraph(skip_attention=layers),
        "no MLP": SubGraph(skip_mlp=layers),
        "head": SubGraph(stop=0),
    }
    sequence = target.sequence([(37 * i) % 20_000 + 100 for i in range(256)])
    target.prefill([sequence])
    tree = TokenTree.chain(range(200, 199 + rows))
    spent: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(24):
        for name, graph in graphs.items():
            began = perf_counter()
            target.score([(sequence, tree)], graph=graph)
            if turn >= 4:
                spent[name].append(1e3 * (perf_counter() - began))
    middle = {name: statistics.median(times) for name, times in spent.items()}
    parts = {
        "attention and its projections": middle["whole"] - middle["no attention"],
        "MLPs": middle["whole"] - middle["no MLP"],
        "LM head": middle["head"],
    }
    return {name: max(0.0, value) for name, value in parts.items()}


def measured(model: Model, method: str, length: int) -> tuple[float, float, dict[str, float]]:
    """Rows and milliseconds a round, and the milliseconds of every part."""
    rows, whole, phases = rounds(model, method, length)
    parts = forward_parts(model, max(1, round(rows)))
    parts["rest of the forward"] = max(0.0, phases["score"] - sum(parts.values()))
    return rows, whole, parts | {name: phases[name] for name in ("draft", "accept", "other")}


CHART = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {{ base + 52 }}" role="img" \
aria-label="milliseconds of a round by part">
<style>text{font:12px system-ui,sans-serif;fill:#444}</style><rect width="100%" height="100%" fill="#ffffff"/>
{% for name, (_, _, parts) in bars.items() %}
{% set top, begun = 14 + loop.index0 * 34, namespace(at=190.0) %}
<text x="180" y="{{ top + 16 }}" text-anchor="end">{{ name }}</text>
{% for part, colour in colours.items() %}
<rect x="{{ begun.at | round(2) }}" y="{{ top }}" width="{{ (unit * parts[part]) | round(2) }}" height="22" \
fill="{{ colour }}"><title>{{ part }}: {{ parts[part] | round(2) }} ms</title></rect>
{% set begun.at = begun.at + unit * parts[part] %}
{% endfor %}
<text x="{{ (begun.at + 6) | round(2) }}" y="{{ top + 16 }}">{{ parts.values() | sum | round(1) }} ms</text>
{% endfor %}
{% for part, colour in colours.items() %}
{% set x, y = (20, 235, 330, 440)[loop.index0 % 4], base + loop.index0 // 4 * 22 %}
<rect x="{{ x }}" y="{{ y }}" width="12" height="12" fill="{{ colour }}"/><text x="{{ x + 18 }}" y="{{ y + 11 }}">\
{{ part }}</text>
{% endfor %}
</svg>"""


def chart(bars: dict[str, tuple[float, float, dict[str, float]]]) -> str:
    """A stacked bar for each row, to one scale."""
    unit = 460 / max(sum(parts.values()) for _, _, parts in bars.values())
    template = Environment(autoescape=True, trim_blocks=True).from_string(CHART)
    return template.render(bars=bars, colours=PARTS, unit=unit, base=14 + len(bars) * 34 + 12)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtypes", default="bfloat16,int4")
    parser.add_argument("--methods", default="none,sam")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bars = {}
    for dtype in options.dtypes.split(","):
        model = outpace.load(options.model, dtype=dtype)
        for method in options.methods.split(","):
            bars[f"{method}, {dtype}"] = measured(model, method, options.length)
    print(f"{'milliseconds a round':<18}{'rows':>6}{'all':>7}" + "".join(f"{name.split()[0]:>11}" for name in PARTS))
    for name, (rows, whole, parts) in bars.items():
        print(f"{name:<18}{rows:>8.1f}{whole:>7.2f}" + "".join(f"{parts[part]:>11.2f}" for part in PARTS))
    if options.svg:
        options.svg.write_text(chart(bars) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
