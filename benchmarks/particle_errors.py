"""What particles get wrong, by their number: on a toy target whose law is known."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from outpace.certify.distributions import autoregressive_distribution
from outpace.certify.exact import tiny_context
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.methods.registry import build
from outpace.targets.table import random_table

PROMPT, VOCABULARY, LENGTH, TABLE = (0, 1, 1), 2, 6, 21
DRAFTED = 1
"""Tokens of each particle in a round: there are three rounds, so that what was resampled is drafted for again."""
_RESAMPLES = 2000
Text = tuple[int, ...]


def particle_errors(count: int, runs: int, seed: int) -> dict[str, Any]:
    """Of ``count`` particles, over ``runs``: total variation between the answers and the target's law, beside that of
    as many independent samples, with the range of 95 % of such samples; and the root mean square error of the estimated
    probability of the likeliest text, as a share of it, with a 95 % bootstrap interval."""
    law = autoregressive_distribution(
        random_table(VOCABULARY, TABLE), VOCABULARY, SamplingParams(temperature=1.0), PROMPT, LENGTH
    )
    text = max(law, key=lambda one: law[one])
    answers: Counter[Text] = Counter()
    errors = []
    for number in range(runs):
        context = tiny_context(VOCABULARY, TABLE)
        method = build("smcsd", context, {"num_particles": count, "num_draft_tokens": DRAFTED})
        decoder = Decoder(context.target)
        sampled = SamplingParams(temperature=1.0, seed=seed + number)
        one = decoder.submit(Request(PROMPT, method, sampled, max_new_tokens=LENGTH))
        decoder.run()
        one.raise_error()
        answers[tuple(one.tokens)] += 1
        estimate = sum(math.exp(each.log_weight) for each in one.hypotheses if each.tokens == text) / count
        errors.append(estimate / law[text] - 1.0)
    texts = list(law)
    generator = np.random.default_rng(seed)
    exact = np.array([law[one] for one in texts])
    alone = generator.multinomial(runs, exact / exact.sum(), size=_RESAMPLES) / runs
    squares = np.square(errors)
    drawn = generator.choice(squares, size=(_RESAMPLES, runs)).mean(1)
    variations = 0.5 * np.abs(alone - exact).sum(1)
    return {
        "particles": count,
        "vocabulary": VOCABULARY,
        "runs": runs,
        "answer_tv": _variation(answers, law, runs),
        "tv_of_samples": float(variations.mean()),
        "tv_of_samples_range": [float(one) for one in np.percentile(variations, (2.5, 97.5))],
        "relative_rmse": float(squares.mean() ** 0.5),
        "relative_rmse_ci95": [float(one) for one in np.sqrt(np.percentile(drawn, (2.5, 97.5)))],
    }


def _variation(answers: Mapping[Text, int], law: Mapping[Text, float], runs: int) -> float:
    return 0.5 * sum(abs(answers.get(one, 0) / runs - law.get(one, 0.0)) for one in {*answers, *law})
