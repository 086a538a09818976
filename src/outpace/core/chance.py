"""Chance: the one source of random numbers in outpace.

``ChanceSource.at(position, purpose)`` opens a stream. Its key is the request (:attr:`SeededChance.key`), the position
(length of the sequence when the round began) and a purpose such as "draft" or "accept". No two rounds share a stream,
and drafter and rule never share a number. Streams are counter-based: single numbers are
keyed BLAKE2b hashes of their place, and noise for whole vocabularies is Philox's (Salmon et al. 2011).

What a drafter drafts must not depend on the numbers that will judge it. An answer depends on the numbers it was sampled
with, so whatever knows that answer must be judged with others. Hence the key of a request is made of its seed, a digest
of its prompt and references (an answer that comes back as either is in another key), and the number of earlier requests
of its namespace with its seed (what a drafter keeps of these answers is in another key). The number is 0 for the first
of them and without a namespace, so that the same request with the same seed repeats its answer.

For certification, :class:`Enumeration` replaces chance by a walk over every outcome with its weight.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence as Seq
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

from outpace.core import races
from outpace.core.token_distribution import TokenDistribution, check_weights, checked_cumsum, drawn

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

T = TypeVar("T")
_Number = tuple[int, str, int]
"""A number of a stream: the stream's position and purpose, and which number of it."""
_Branch = tuple[int, float]
"""An outcome and its weight."""


class Chance(Protocol):
    """One stream of random decisions."""

    def bernoulli(self, p: float) -> bool:
        """True with probability ``p`` (clamped to [0, 1])."""
        ...

    def bernoulli_at_most(self, most: float, p: Callable[[], float]) -> bool:
        """As ``bernoulli(p())``, where ``p()`` is never above ``most``: it is asked only where that leaves it open."""
        ...

    def categorical(self, weights: Tensor | TokenDistribution) -> int:
        """An index with probability proportional to ``weights``, shape (n,), non-negative, not all zero."""
        ...

    def ordered_sample(self, weights: Tensor | TokenDistribution, k: int) -> list[int]:
        """Up to ``k`` indices drawn one after the other without replacement, proportional to ``weights`` (n,)."""
        ...

    def uniform(self) -> float:
        """A number in [0, 1)."""
        ...

    def gumbel(self, n: int) -> Tensor:
        """``n`` standard Gumbel numbers, float64."""
        ...

    def race(self, weights: Tensor) -> int:
        """argmax(log ``weights`` + G): an index with probability proportional to ``weights``, as for ``categorical``.

        G, one Gumbel number for each index, is drawn once: every race of one stream is run with the same noise, and so
        is every race of the stream when it is opened again and first asked for this.
        """
        ...


class ChanceSource(Protocol):
    """The streams of one request, by position (tokens before the round) and purpose."""

    def at(self, position: int, purpose: str) -> Chance: ...


class _Stream:
    def __init__(self, source: SeededChance, purpose: str, position: int) -> None:
        self._at = source, purpose, position
        self._times: Tensor | None = None
        self._drawn = 0
        """Single numbers so far."""

    @cached_property
    def _generator(self) -> np.random.Generator:
        """For numbers by the thousand; made when they are asked for, which takes longer than a hundred single ones."""
        import numpy as np

        source, purpose, position = self._at
        digest = hashlib.blake2b(source.key + purpose.encode(), digest_size=16).digest()
        key = np.frombuffer(digest, dtype=np.uint64)
        # The position takes the high word of the counter: no stream ever runs into the next one's numbers.
        return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, position]))

    def bernoulli(self, p: float) -> bool:
        return self.uniform() < p

    def bernoulli_at_most(self, most: float, p: Callable[[], float]) -> bool:
        number = self.uniform()
        return number < most and number < p()

    def categorical(self, weights: Tensor | TokenDistribution) -> int:
        if isinstance(weights, TokenDistribution):
            return weights.draw(self.uniform())
        return drawn(weights, self.uniform())

    def ordered_sample(self, weights: Tensor | TokenDistribution, k: int) -> list[int]:
        import numpy as np

        if isinstance(weights, TokenDistribution):
            return weights.sequential_draws([self.uniform() for _ in range(min(k, weights.size))])
        # Gumbel-top-k: the order of perturbed log-weights is that of sequential draws (Vieira 2014).
        perturbed = weights.double().log() + self.gumbel(len(weights)).to(weights.device)
        best = perturbed.topk(min(k, len(weights)))
        return [
            index for index, value in zip(best.indices.tolist(), best.values.tolist(), strict=True) if value > -np.inf
        ]

    def uniform(self) -> float:
        source, purpose, position = self._at
        counted = hashlib.blake2b(
            b"%s|%d|%d" % (purpose.encode(), position, self._drawn), digest_size=8, key=source.key
        )
        self._drawn += 1
        return (int.from_bytes(counted.digest(), "little") >> 11) * 2.0**-53

    def gumbel(self, n: int) -> Tensor:
        import torch

        return torch.from_numpy(self._generator.gumbel(size=n))

    def race(self, weights: Tensor) -> int:
        import torch

        check_weights(weights)
        if self._times is None or self._times.device != weights.device:
            # G = -log E for a standard exponential E, and argmax(log w - log E) = argmax(w / E): no logarithm.
            drawn = self._generator.standard_exponential(len(weights)) if self._times is None else self._times.cpu()
            self._times = torch.as_tensor(drawn, dtype=torch.float64).clamp_(min=1e-300).to(weights.device)
        return int((weights.double() / self._times).argmax())


class SeededChance:
    """Streams for one request: ``seed``, its ``texts`` (token ids of the prompt and of every reference), and how many
    ``earlier`` requests of its namespace had its seed."""

    def __init__(self, seed: int, texts: Seq[Seq[int]] = (), earlier: int = 0) -> None:
        self.seed, self.texts, self.earlier = seed, texts, earlier

    @cached_property
    def key(self) -> bytes:
        """What tells its streams from those of other requests."""
        import numpy as np

        digest = hashlib.blake2b(f"{self.seed}|{self.earlier}".encode(), digest_size=16)
        for text in self.texts:
            digest.update(f"|{len(text)}|".encode())
            digest.update(np.asarray(text, dtype=np.int64).tobytes())
        return digest.digest()

    def reseeded(self, seed: int) -> SeededChance:
        """The streams that the same request would have with another seed."""
        return SeededChance(seed, self.texts, self.earlier)

    def at(self, position: int, purpose: str) -> Chance:
        return _Stream(self, purpose, position)


class _Path:
    """One run of the enumerated program: replays a script of choices, then takes the first open branch.

    Streams are keyed as the seeded ones are: a stream that is opened twice gives the same numbers twice, so a
    drafter and a rule that share a number are correlated here as they would be in the field.
    """

    def __init__(self, script: list[tuple[int, list[_Branch]]]) -> None:
        self.script = script
        self.cursor = 0
        self.weight = 1.0
        self.known: dict[_Number, tuple[float, float]] = {}
        """The interval in which a uniform number lies, by what was decided with it."""
        self.races: dict[tuple[int, str], tuple[races.Race, ...]] = {}
        """The races that were run with a stream's noise."""

    def at(self, position: int, purpose: str) -> Chance:
        return _PathStream(self, position, purpose)

    def choose(self, number: _Number, weights: list[float]) -> int:
        """The index that a uniform ``number`` falls on; its interval narrows with everything decided by it."""
        low, high = self.known.get(number, (0.0, 1.0))
        branches: list[_Branch] = []
        intervals: dict[int, tuple[float, float]] = {}
        begin = 0.0
        last = max(index for index, weight in enumerate(weights) if weight > 0.0)
        for index, weight in enumerate(weights):
            end = 1.0 if index == last else begin + weight
            inside = (max(low, begin), min(high, end))
            if weight > 0.0 and inside[0] < inside[1]:
                share = weight if number not in self.known else (inside[1] - inside[0]) / (high - low)
                branches.append((index, share))
                intervals[index] = inside
            begin = end
        chosen = self._take(branches)
        self.known[number] = intervals[chosen]
        return chosen

    def race(self, stream: tuple[int, str], weights: tuple[float, ...]) -> int:
        """The winner of a race, given the winners of those that were run with the stream's noise before."""
        before = self.races.get(stream, ())
        again = next((winner for known, winner in before if known == weights), None)
        if again is not None:
            return again
        runs = {index: (*before, (weights, index)) for index, weight in enumerate(weights) if weight > 0.0}
        joint = {index: races.probability(run) for index, run in runs.items()}
        total = sum(joint.values())
        chosen = self._take([(index, share / total) for index, share in joint.items() if share > 0.0])
        self.races[stream] = runs[chosen]
        return chosen

    def _take(self, branches: list[_Branch]) -> int:
        """The outcome that the script says, or the first where it says nothing yet."""
        if len(branches) == 1:
            branch = branches[0]
        else:
            if self.cursor == len(self.script):
                self.script.append((0, branches))
            taken, before = self.script[self.cursor]
            if [one[0] for one in before] != [one[0] for one in branches]:
                raise NotEnumerable("the enumerated program is not a function of its random choices")
            self.cursor += 1
            branch = branches[taken]
            self.weight *= branch[1]
        return branch[0]


class _Walk(_Path):
    """One run in which every open branch is as likely as the others beside it."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__([])
        self._rng = rng
        self.outcomes = 1.0
        """As many as there are if all others branch as this one does."""

    def _take(self, branches: list[_Branch]) -> int:
        self.outcomes *= len(branches)
        return self._rng.choice(branches)[0]


class _PathStream:
    def __init__(self, path: _Path, position: int, purpose: str) -> None:
        self._path, self._position, self._purpose = path, position, purpose
        self._count = 0

    def _choose(self, weights: list[float]) -> int:
        number = (self._position, self._purpose, self._count)
        self._count += 1
        return self._path.choose(number, weights)

    def bernoulli(self, p: float) -> bool:
        p = min(max(p, 0.0), 1.0)
        return self._choose([p, 1.0 - p]) == 0

    def bernoulli_at_most(self, most: float, p: Callable[[], float]) -> bool:
        found = p()
        if found > most:
            raise RuntimeError(f"a probability of {found} was said to be at most {most}")
        return self.bernoulli(found)

    def categorical(self, weights: Tensor | TokenDistribution) -> int:
        weights = weights.dense() if isinstance(weights, TokenDistribution) else weights
        return self._choose((weights.double() / checked_cumsum(weights)[-1]).tolist())

    def ordered_sample(self, weights: Tensor | TokenDistribution, k: int) -> list[int]:
        left = weights.dense().clone() if isinstance(weights, TokenDistribution) else weights.clone()
        taken: list[int] = []
        while len(taken) < k and float(left.sum()) > 0.0:
            taken.append(self.categorical(left))
            left[taken[-1]] = 0.0
        return taken

    def uniform(self) -> float:
        raise NotEnumerable("continuous noise cannot be enumerated; certify this method statistically")

    def gumbel(self, n: int) -> Tensor:
        raise NotEnumerable("continuous noise cannot be enumerated; certify this method statistically")

    def race(self, weights: Tensor) -> int:
        shares = weights.double() / checked_cumsum(weights)[-1]
        return self._path.race((self._position, self._purpose), tuple(shares.tolist()))


class NotEnumerable(NotImplementedError):
    """A program has continuous noise, too many outcomes, or randomness from elsewhere."""


class Enumeration:
    """Runs a program once for every sequence of random outcomes.

    >>> runs = Enumeration.outcomes(lambda chance: chance.at(0, "coin").bernoulli(0.25))
    >>> sorted(runs)
    [(False, 0.75), (True, 0.25)]
    """

    @staticmethod
    def outcomes(program: Callable[[ChanceSource], T], limit: int = 10_000_000) -> Iterator[tuple[T, float]]:
        """Yield ``(result, weight)`` for every branch; the weights sum to one.

        Raises NotEnumerable when there are more than ``limit`` branches.
        """
        script: list[tuple[int, list[_Branch]]] = []
        for _ in range(limit):
            path = _Path(script)
            result = program(path)
            yield result, path.weight
            while script and script[-1][0] + 1 == len(script[-1][1]):
                script.pop()
            if not script:
                return
            index, branches = script[-1]
            script[-1] = (index + 1, branches)
        raise NotEnumerable(f"more than {limit} branches to enumerate")

    @staticmethod
    def size(program: Callable[[ChanceSource], object], walks: int = 64) -> float:
        """About how many branches there are, from a few random ones: unbiased (Knuth 1975, Estimating the efficiency
        of backtrack programs)."""
        rng = random.Random(0)
        found = [_Walk(rng) for _ in range(walks)]
        for walk in found:
            program(walk)
        return sum(walk.outcomes for walk in found) / walks
