"""Record one answer with and without speculative decoding, and write both as one animated picture (SVG).

Two processes run one after the other, ``outpace generate --method none`` and then with ``--method METHOD``, with
the same prompt and settings. Each piece of text is noted with the time at which it reached the terminal; time zero is
the first piece, so that loading does not count. The picture plays both side by side at the recorded speed. Usage::

    python benchmarks/recording.py --model qwen2.5-coder-1.5b.gguf --prompt-file prompt.txt --out docs/recording.svg

``--json FILE`` keeps the recording; ``--from FILE`` draws such a file again without running anything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SIZE, ADVANCE, LEADING = 13, 7.83, 19
"""Of the font, in pixels: its size, the width of a character, the height of a line."""
MARGIN, BAR, GAP = 16, 34, 18
PAUSE = 3.0
"""Seconds between the end of the slower answer and the next play."""


@dataclass(slots=True)
class Recording:
    """One answer: pieces of text with the seconds since the first, and the status line that followed."""

    title: str
    pieces: list[tuple[float, str]]
    status: str

    @property
    def seconds(self) -> float:
        """From the first piece of text to the last."""
        return self.pieces[-1][0]


def record(title: str, command: list[str]) -> Recording:
    """Run ``outpace generate`` and note when each piece of its answer arrives."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        found, began = list[tuple[float, bytes]](), 0.0
        while data := os.read(process.stdout.fileno(), 65536):
            now = time.perf_counter()
            began = began or now
            found.append((now - began, data))
        status = process.stderr.read().decode()
    if process.returncode:
        sys.exit(status)
    return Recording(title, list(_decoded(found)), status.strip().splitlines()[-1])


def _decoded(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """Pieces as text; bytes of a character that is not complete wait for the next piece."""
    held = b""
    for at, data in pieces:
        held += data
        try:
            text, held = held.decode(), b""
        except UnicodeDecodeError:
            continue
        yield at, text


def wrapped(pieces: list[tuple[float, str]], columns: int) -> list[list[tuple[float, int, str]]]:
    """Lines of (seconds, column, text): the pieces where a terminal of so many columns would show them."""
    text = "".join(piece for _, piece in pieces).rstrip()
    moments = [at for at, piece in pieces for _ in piece]
    lines, position = list[list[tuple[float, int, str]]](), 0
    for paragraph in text.split("\n"):
        rows = textwrap.wrap(
            paragraph, columns, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False
        ) or [""]
        for row in rows:
            line = list[tuple[float, int, str]]()
            for column, character in enumerate(row):
                at = moments[position]
                if line and line[-1][0] == at:
                    line[-1] = (at, line[-1][1], line[-1][2] + character)
                else:
                    line.append((at, column, character))
                position += 1
            lines.append(line)
        position += 1  # the newline itself
    return lines


def draw(prompt: str, recordings: list[Recording], columns: int) -> str:
    """The animated picture; a reader who asked for reduced motion sees the end of it."""
    panels = [wrapped(one.pieces, columns) for one in recordings]
    rows = max(map(len, panels))
    width = round(columns * ADVANCE) + 2 * MARGIN
    height = BAR + (rows + 3) * LEADING
    total = len(panels) * width + GAP * (len(panels) - 1)
    first, *rest = prompt.splitlines()
    more = f"  (and {len(rest)} lines of text)" if rest else ""
    asked = textwrap.wrap(first + more, int(total / ADVANCE) - 4, max_lines=3, placeholder=" …")
    top = (len(asked) + 1) * LEADING + 6
    duration = max(one.seconds for one in recordings) + PAUSE
    styles, body = dict[str, str](), list[str]()
    for line, text in enumerate(asked):
        mark = "$ " if not line else "  "
        body.append(f'<text class="asked" x="4" y="{(line + 1) * LEADING}">{escape(mark + text)}</text>')
    for index, (recording, panel) in enumerate(zip(recordings, panels, strict=True)):
        body += _panel(recording, panel, index * (width + GAP), top, width, height, duration, styles)
    said = "; ".join(f"{one.title}: {one.seconds:.1f} s" for one in recordings)
    frames = "\n".join(f"@keyframes {name}{{{rule}}}" for name, rule in styles.items())
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {top + height}" role="img"
 aria-label="{escape(said)}">
<title>{escape(said)}</title>
<style>
text{{font:{SIZE}px {FONT};white-space:pre;fill:#d7dee8}}
.asked{{fill:#5b6b7f}}
.title{{fill:#9fb0c3;font-weight:600}}
.clock{{fill:#7fd1b9}}
.t{{opacity:0;animation:{duration:.2f}s step-end infinite}}
{frames}
@media (prefers-color-scheme:dark){{.asked{{fill:#9fb0c3}}}}
@media (prefers-reduced-motion:reduce){{.t{{animation:none;opacity:1}}.run{{display:none}}}}
</style>
{chr(10).join(body)}
</svg>
"""


def _panel(
    recording: Recording,
    lines: list[list[tuple[float, int, str]]],
    left: float,
    top: float,
    width: float,
    height: float,
    duration: float,
    styles: dict[str, str],
) -> Iterator[str]:
    yield f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="8" fill="#101820"/>'
    yield f'<rect x="{left}" y="{top}" width="{width}" height="{BAR - 8}" rx="8" fill="#1b2733"/>'
    yield f'<text class="title" x="{left + MARGIN}" y="{top + 18}">{escape(recording.title)}</text>'
    for row, line in enumerate(lines):
        y = top + BAR + (row + 1) * LEADING
        for at, column, text in line:
            if text.strip():
                x = left + MARGIN + column * ADVANCE
                name = _shown_from(at, duration, styles)
                yield f'<text class="t" style="animation-name:{name}" x="{x:.1f}" y="{y}">{escape(text)}</text>'
    # A clock in tenths of a second that stops with the answer.
    y, end = top + height - LEADING, recording.seconds
    steps = [*(tenth / 10 for tenth in range(int(end * 10) + 1)), end]
    for at, until in zip(steps, [*steps[1:], None], strict=True):
        name = _shown_from(at, duration, styles, until)
        kind = "t clock" if until is None else "t clock run"
        words = f"{at:.1f} s" if until is not None else f"{at:.1f} s   {_rate(recording)}"
        yield f'<text class="{kind}" style="animation-name:{name}" x="{left + MARGIN}" y="{y}">{escape(words)}</text>'


def _rate(recording: Recording) -> str:
    """The rates of the status line: tokens a second and a round."""
    parts = recording.status.split(": ", 1)[-1].split(", ")
    return ", ".join(part for part in parts if "tokens" in part)


def _shown_from(at: float, duration: float, styles: dict[str, str], until: float | None = None) -> str:
    """The name of keyframes that show something from ``at`` on, or between ``at`` and ``until`` (seconds)."""
    begin, end = 100 * at / duration, None if until is None else 100 * until / duration
    name = f"k{round(begin * 100)}" + ("" if end is None else f"_{round(end * 100)}")
    rule = ("0%{opacity:0}" if begin > 0 else "") + f"{begin:.2f}%{{opacity:1}}"
    styles[name] = rule + ("" if end is None else f"{end:.2f}%{{opacity:0}}")
    return name


def main() -> None:
    """Record, or read a recording, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--prompt-file", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--columns", type=int, default=58)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--from", type=Path, dest="recorded")
    parser.add_argument("--out", type=Path, required=True)
    wanted = parser.parse_args()
    if wanted.recorded:
        kept = json.loads(wanted.recorded.read_text(encoding="utf-8"))
        prompt = kept["prompt"]
        recordings = [
            Recording(one["title"], [(at, text) for at, text in one["pieces"]], one["status"])
            for one in kept["recordings"]
        ]
    else:
        if wanted.prompt_file is None:
            parser.error("--prompt-file or --from is needed")
        prompt = wanted.prompt_file.read_text(encoding="utf-8").strip()
        common = [sys.executable, "-m", "outpace", "generate", prompt, "--model", wanted.model]
        common += ["--max-new-tokens", str(wanted.max_new_tokens), "--threads", str(wanted.threads)]
        recordings = [
            record(title, [*common, "--method", method])
            for title, method in (("autoregressive", "none"), (f"outpace, --method {wanted.method}", wanted.method))
        ]
        answers = {"".join(text for _, text in one.pieces) for one in recordings}
        print("identical output" if len(answers) == 1 else "THE OUTPUTS DIFFER")
    for one in recordings:
        print(f"{one.title}: {one.seconds:.2f} s after the first piece; {one.status}")
    if wanted.json:
        kept = {"prompt": prompt, "recordings": [asdict(one) for one in recordings]}
        wanted.json.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    wanted.out.write_text(draw(prompt, recordings, wanted.columns), encoding="utf-8")


if __name__ == "__main__":
    main()
