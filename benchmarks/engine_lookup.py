"""Lookup methods inside vLLM: outpace's Proposer beside vLLM's own n-gram and suffix decoding.

    python benchmarks/engine_lookup.py --json out/engine_lookup.json
    python benchmarks/engine_lookup.py --eager --only ngram,suffix,pld,recycling,merge,cacheback --loads copy,code
    python benchmarks/engine_lookup.py --batch 4 --only suffix,sam --tokens 64

All servers run at the same time on one thread each and take turns: every prompt goes to each of them, in an order that
rotates, greedy, one request at a time or ``--batch`` of them together. Models are compiled, as vLLM does by default;
``--eager`` leaves that out, and servers start a minute earlier. Loads: ``copy`` (a passage to be repeated), ``code`` (a
function to be rewritten), ``again`` (the second of two requests that ask for the same in other words, in one
namespace). Shown are decoded tokens per second as a ratio to vLLM without speculation (the median over prompts, or over
batches), tokens per forward of a row, and how many answers are identical to those without speculation. ``plain`` is
vLLM as it comes. ``custom_class`` runs on its V1 model runner without asynchronous scheduling, and is charged for that
where vLLM has anything else, on GPUs.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from outpace.core.files import write_atomically
from outpace.integrations.vllm.proposer_options import ProposerOptions
from outpace.integrations.vllm.server import running_server
from outpace.integrations.vllm.speculative_config import CUSTOM_CLASS

MODEL = "smollm2"
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 32}
OURS = {"method": "custom_class", "model": CUSTOM_CLASS, "num_speculative_tokens": 16}
ROWS: dict[str, tuple[dict[str, Any] | None, ProposerOptions | None]] = {
    "plain": (None, None),
    "ngram": (NGRAM, None),
    "suffix": (SUFFIX, None),
    "pld": (OURS, ProposerOptions(method="pld")),
    "sam": (OURS, ProposerOptions(method="sam")),
    "cascade": (OURS, ProposerOptions(method="cascade", settings={"parts": ["sam", "cacheback"]})),
    "cacheback": (OURS, ProposerOptions(method="cacheback")),
    "recycling": (OURS, ProposerOptions(method="recycling")),
    "merge": (OURS, ProposerOptions(method="merge")),
}
LOADS = ("copy", "code", "again")
BATCHES = (1, 2, 4)
"""A load has four prompts; one that is sent twice would be copied from its own answer."""
TIMED = 24
"""Answers with fewer tokens after their first chunk are not timed: a chunk may hold most of them."""

PASSAGES = (
    "The harbour was built in 1874 by the town council, which had borrowed the money from three banks in the capital. "
    "Its two stone piers, each four hundred metres long, were the work of an engineer named Ada Lindqvist, who had "
    "never built a harbour before. Ships carried timber, iron and dried fish to Lübeck, Hull and Bordeaux.",
    "To install the pump, first close the main valve and drain the pipe. Remove the four bolts of the old pump, clean "
    "the flange, and lay the new gasket on it. Set the new pump on the gasket, tighten the four bolts in the order 1, "
    "3, 2, 4, and open the main valve slowly. Check the gasket for leaks after ten minutes and again after one day.",
    "In the first quarter the company sold 18,400 bicycles, 12 percent more than a year before. Sales in Germany rose "
    "by 21 percent, sales in France by 9 percent, and sales in Italy fell by 3 percent. The company expects to sell "
    "80,000 bicycles in the whole year and plans a second factory near Lyon, which will employ 240 people.",
    "Mira opened the letter at the kitchen table. It said that her aunt had left her the house by the lake, the boat, "
    "and the dog, whose name was Biscuit. Mira had met her aunt twice. She read the letter again, put it into the "
    "drawer with the spoons, and went out to look for a map of the lake.",
)
CODE = (
    "def mean(values):\n    total = 0.0\n    count = 0\n    for value in values:\n        total += value\n        "
    "count += 1\n    if count == 0:\n        return None\n    return total / count\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        "
    "self.items.append(item)\n\n    def pop(self):\n        if not self.items:\n            raise IndexError('empty')\n"
    "        return self.items.pop()\n",
    "def read_config(path):\n    settings = {}\n    with open(path) as file:\n        for line in file:\n            "
    "line = line.strip()\n            if not line or line.startswith('#'):\n                continue\n            "
    "key, value = line.split('=', 1)\n            settings[key.strip()] = value.strip()\n    return settings\n",
    "def search(items, wanted):\n    low, high = 0, len(items)\n    while low < high:\n        middle = (low + high)"
    " // 2\n        if items[middle] < wanted:\n            low = middle + 1\n        else:\n            high = middle"
    "\n    return low if low < len(items) and items[low] == wanted else -1\n",
)
QUESTIONS = (
    ("What is photosynthesis?", "Explain what photosynthesis is."),
    ("How do I boil an egg?", "Tell me how to boil an egg."),
    ("Why is the sky blue?", "Explain why the sky is blue."),
    ("What does a compiler do?", "Explain what a compiler does."),
)


def asked(load: str) -> list[list[str]]:
    """Prompts in the order in which they are sent; of each list the last one is measured."""
    if load == "copy":
        return [[f"Repeat this text word for word:\n\n{one}"] for one in PASSAGES]
    if load == "code":
        return [[f"Add a docstring to this code and print all of it:\n\n{one}"] for one in CODE]
    return [list(pair) for pair in QUESTIONS]


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer: its text, the tokens after its first chunk, and when the first and the last chunk came."""

    text: str
    tokens: int
    first: float
    last: float


class Server:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask_together(self, texts: Sequence[str], tokens: int, namespaces: Sequence[str]) -> list[Answer]:
        """The answers to requests that run at the same time."""
        with ThreadPoolExecutor(len(texts)) as pool:
            return list(pool.map(self.ask, texts, [tokens] * len(texts), namespaces))

    def ask(self, text: str, tokens: int, namespace: str) -> Answer:
        """The answer to one request."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "vllm_xargs": {"namespace": namespace},
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        first: float | None = None
        said, last, begun, done = "", 0.0, 0, 0
        with urllib.request.urlopen(request, timeout=600) as reply:
            for raw in reply:
                line = raw.decode().strip()
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if not chunk["choices"] or chunk["usage"]["completion_tokens"] == 0:
                    continue
                last, done = perf_counter(), chunk["usage"]["completion_tokens"]
                if first is None:
                    first, begun = last, done
                said += chunk["choices"][0]["delta"].get("content") or ""
        return Answer(said, done - begun, last if first is None else first, last)

    def accepted(self) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        return sum(map(float, re.findall(r"^vllm:spec_decode_num_accepted_tokens_total(?:\{.*\})? (\S+)", text, re.M)))


def measure(servers: dict[str, Server], load: str, tokens: int, passes: int, batch: int) -> dict[str, dict[str, Any]]:
    """All prompts of one load, by turns, ``batch`` at a time."""
    rates: dict[str, list[list[float]]] = {name: [] for name in servers}
    answers: dict[str, list[str]] = {name: [] for name in servers}
    counted = {name: [0, 0.0] for name in servers}
    order = list(servers)
    prompts = asked(load)
    for start in range(0, len(prompts), batch):
        together = list(zip(*prompts[start : start + batch], strict=True))
        for name in servers:
            rates[name].append([])
        for turn in range(passes):
            order = order[1:] + order[:1]
            for name in order:
                server = servers[name]
                namespaces = [f"{load}{start + at}.{turn}.{random.random()}" for at in range(len(together[0]))]
                for texts in together[:-1]:
                    server.ask_together(texts, tokens, namespaces)
                before = server.accepted()
                said = server.ask_together(together[-1], tokens, namespaces)
                accepted = server.accepted() - before
                count = sum(one.tokens for one in said)
                if count >= TIMED * len(said):
                    seconds = max(one.last for one in said) - min(one.first for one in said)
                    rates[name][-1].append(count / seconds)
                counted[name][0] += count
                counted[name][1] += accepted
                if turn == 0:
                    answers[name] += [one.text for one in said]
    found = {}
    for name in servers:
        pairs = zip(rates[name], rates["plain"], strict=True)
        ratios = [max(mine) / max(base) for mine, base in pairs if mine and base]
        decoded, accepted = counted[name]
        found[name] = {
            "speedup": round(statistics.median(ratios), 3) if ratios else None,
            "least": round(min(ratios, default=0.0), 3),
            "most": round(max(ratios, default=0.0), 3),
            "timed": len(ratios),
            "tokens_per_forward": round(decoded / max(1.0, decoded - accepted), 3),
            "identical": sum(map(str.__eq__, answers[name], answers["plain"])),
            "prompts": len(answers[name]),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(ROWS), help="default: %(default)s")
    parser.add_argument("--loads", default=",".join(LOADS), help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer; default: %(default)s")
    parser.add_argument(
        "--passes",
        type=int,
        default=1,
        help="the best of so many counts; from the second on, vLLM's suffix decoding has seen its own answer, which no "
        "namespace keeps from it; default: %(default)s",
    )
    parser.add_argument("--batch", type=int, default=1, choices=BATCHES, help="requests at once; default: %(default)s")
    parser.add_argument("--eager", action="store_true", help="do not compile the model: servers start a minute earlier")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--vllm-python", default=None)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    names, loads = dict.fromkeys(("plain", *given.only.split(","))), given.loads.split(",")
    for kind, chosen, known in (("--only", names, ROWS), ("--loads", loads, LOADS)):
        for one in chosen:
            if one not in known:
                parser.error(f"{kind}: there is no '{one}'; there are {', '.join(known)}")
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        servers = {}
        for name in names:
            config, proposer = ROWS[name]
            running = running_server(
                MODEL,
                config,
                dtype=given.dtype,
                python=given.vllm_python,
                proposer=proposer,
                threads=1,
                max_num_seqs=given.batch,
                eager=given.eager,
            )
            servers[name] = Server(stack.enter_context(running))
            servers[name].ask_together(["Hello"] * given.batch, 8, [""] * given.batch)
            print(f"{name}: ready", file=sys.stderr, flush=True)
        for load in loads:
            results[load] = measure(servers, load, given.tokens, given.passes, given.batch)
            for name, row in results[load].items():
                print(f"{load:6} {name:10} {json.dumps(row)}", flush=True)
            if given.json:
                write_atomically(given.json, json.dumps(results, indent=1).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
