"""Bayesian optimisation over sets: which of n things to leave out, where every try is expensive.

A Gaussian process over binary masks predicts the value of a mask that was not tried yet, with a standard deviation. Its
covariance falls with the Hamming distance d: ``w (1 - 2 d / n) + (1 - w) exp(-d / l)``, the effect of each flag alone
plus that of flags together; w, l and the noise are those of a small grid under which the tries are likeliest. The next
mask has the largest expected improvement of a pool of random masks and of neighbours of the best (Jones et al. 1998).

A few hundred tries at most: small enough for Cholesky factors in numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq

import numpy as np
import numpy.typing as npt

from outpace.drafting.layer_skips import Mask

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
_REMEMBERED = 256
"""Tries that the process is fitted to: the best half of these, and the latest."""
_POOL = 300


class MaskSearch:
    """Proposes masks of ``length`` flags and learns their values; larger is better.

    Only the flags in ``free`` may be set, at least ``fewest`` and at most ``most`` of them. The first ``initial`` masks
    are random; after them every ``interval``-th is Bayesian, the others random. What is proposed is a function of
    ``seed`` and of the tries, so that an interrupted search goes on as if it had not been.
    """

    def __init__(
        self,
        length: int,
        free: Iterable[int],
        fewest: int,
        most: int,
        *,
        initial: int = 8,
        interval: int = 1,
        seed: int = 0,
    ) -> None:
        self.length = length
        self.free = np.array(sorted(free), dtype=int)
        self.fewest, self.most = fewest, min(most, len(self.free))
        self.initial = initial
        self.interval = interval
        self.seed = seed
        self.tries: dict[Mask, float] = {}
        self.best: Mask | None = None
        self.told = 0

    def tell(self, mask: Mask, value: float) -> bool:
        """Record a mask's value; of a mask tried again, the latest counts. True where it is the new best."""
        self.tries[mask] = value
        self.told += 1
        leader = max(self.tries, key=self.tries.__getitem__)
        better = leader != self.best
        self.best = leader
        return better

    def suggest(self) -> Mask:
        """The mask to try next."""
        rng = np.random.default_rng([self.seed, self.told])
        bayesian = self.told >= self.initial and (self.told - self.initial) % self.interval == 0
        if not bayesian or len(self.tries) < 2:
            return self._random(rng)
        pool = self._pool(rng)
        return pool[int(np.argmax(self.improvement(pool)))]

    def _random(self, rng: np.random.Generator) -> Mask:
        count = int(rng.integers(self.fewest, self.most + 1))
        return self._mask(rng.choice(self.free, size=count, replace=False))

    def _mask(self, chosen: Iterable[int]) -> Mask:
        flags = [False] * self.length
        for index in chosen:
            flags[int(index)] = True
        return tuple(flags)

    def _pool(self, rng: np.random.Generator) -> list[Mask]:
        """Random masks, and the best ones with a few flags changed or moved; none that was tried."""
        pool = {self._random(rng) for _ in range(_POOL // 3)}
        leaders = sorted(self.tries, key=self.tries.__getitem__, reverse=True)[:4]
        for _ in range(_POOL):
            chosen = {index for index, flag in enumerate(leaders[int(rng.integers(len(leaders)))]) if flag}
            for _ in range(int(rng.integers(1, 4))):
                rest = [index for index in self.free.tolist() if index not in chosen]
                action = rng.integers(3)
                if chosen and (action == 0 or (action == 2 and rest)):
                    chosen.discard(sorted(chosen)[int(rng.integers(len(chosen)))])
                if rest and action >= 1:
                    chosen.add(rest[int(rng.integers(len(rest)))])
            if self.fewest <= len(chosen) <= self.most:
                pool.add(self._mask(chosen))
        return sorted(pool - self.tries.keys()) or [self._random(rng)]

    def improvement(self, pool: Seq[Mask]) -> Array:
        """Expected improvement over the best try, (len(pool),), in standard deviations of the tries."""
        from scipy.stats import norm  # takes a second to import: not at every start

        masks, values = self._known()
        centre, scale = float(values.mean()), float(values.std()) or 1.0
        mean, deviation = _posterior(masks, (values - centre) / scale, np.array(pool, dtype=bool))
        gain = mean - (float(values.max()) - centre) / scale
        z = gain / deviation
        return np.asarray(gain * norm.cdf(z) + deviation * norm.pdf(z), dtype=np.float64)

    def _known(self) -> tuple[Flags, Array]:
        items = list(self.tries.items())
        if len(items) > _REMEMBERED:
            late, early = items[-_REMEMBERED // 2 :], items[: -_REMEMBERED // 2]
            items = sorted(early, key=lambda item: item[1])[-_REMEMBERED // 2 :] + late
        return np.array([mask for mask, _ in items], dtype=bool), np.array([value for _, value in items])


def _covariance(one: Flags, other: Flags, weight: float, reach: float) -> Array:
    distance = (one[:, None, :] != other[None, :, :]).sum(-1).astype(float)
    alone, together = 1.0 - 2.0 * distance / one.shape[1], np.exp(-distance / reach)
    covariance: Array = weight * alone + (1.0 - weight) * together
    return covariance


def _posterior(masks: Flags, values: Array, pool: Flags) -> tuple[Array, Array]:
    """Mean and standard deviation at ``pool`` under the likeliest settings of the grid."""
    from scipy.linalg import cho_solve, cholesky

    length = masks.shape[1]
    best = None
    for weight in (0.2, 0.6):
        for reach in (length / 16, length / 4):
            clean = _covariance(masks, masks, weight, reach)
            for noise in (1e-3, 1e-1):
                factor = cholesky(clean + noise * np.eye(len(masks)), lower=True)
                solved = cho_solve((factor, True), values)
                evidence = -0.5 * values @ solved - np.log(np.diag(factor)).sum()
                if best is None or evidence > best[0]:
                    best = evidence, weight, reach, factor, solved
    assert best is not None
    _, weight, reach, factor, solved = best
    across = _covariance(pool, masks, weight, reach)
    variance = 1.0 - np.einsum("ij,ji->i", across, cho_solve((factor, True), across.T))
    return across @ solved, np.sqrt(np.maximum(variance, 1e-12))
