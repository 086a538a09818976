"""What a server is asked for its certificate: prompts, sampling, how many draws; and whether seeds make them differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outpace.certify.endpoint import Endpoint
from outpace.certify.server_client import Answer
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams

DRAFT_LENGTH = 6
_APART = 1_000_000
"""Between the seeds of two requests: a request with several answers uses the seeds that follow its own."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked. ``params`` of temperature 0: greedy answers alone. ``samples``: tokens that each side draws where
    drafts of ``draft_length`` tokens are judged. ``seed``: None sends none, as most clients do."""

    texts: Sequence[str]
    params: SamplingParams
    samples: int = 5000
    draft_length: int = DRAFT_LENGTH
    alpha: float = 0.01
    seed: int | None = None

    @property
    def length(self) -> int:
        """Tokens of a sampled answer: the last is the one that follows a draft which was accepted whole."""
        return self.draft_length + 2

    @property
    def answers(self) -> int:
        """Sampled answers of each side after each prompt."""
        return -(-self.samples // (len(self.texts) * (self.length - 1)))

    def request_seed(self, side: int, number: int) -> int | None:
        """The seed of one request of a side; None where none is sent."""
        return None if self.seed is None else ((self.seed * 10 + side) * 1_000_000 + number) * _APART % 2**62


def check_randomness(asked: Endpoint, found: dict[int, list[Answer]], seed: int | None) -> None:
    """Raise BadInput where every request got the same answers, so that only one of them counts."""
    size = asked.choices
    if seed is not None or size < 2:
        return

    def batches(answers: Sequence[Answer]) -> Iterator[tuple[str, ...]]:
        for at in range(0, len(answers) - size + 1, size):
            yield tuple(one.text for one in answers[at : at + size])

    repeated = [list(batches(answers)) for answers in found.values()]
    varied = any(len(set(batch)) > 1 for one in repeated for batch in one)
    if varied and all(len(one) > 1 and len(set(one)) == 1 for one in repeated):
        raise BadInput(f"{asked.server.where} repeats its answers: it has a fixed seed; give --seed to send others")
