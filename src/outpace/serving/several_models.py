"""Requests that offer several models: which of them answers.

A request is answered by the model that its ``model`` names, whatever the method. Only where it names several, separated
by commas, one of them is chosen, and the answer's ``model`` says which. By that the caller says that the answer of any
of them will do: the models are not compared by what they would say, but by when they are expected to have said it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

from outpace.core.turns import ROUNDS
from outpace.methods.registry import routers
from outpace.models.base import ChatTokenizer
from outpace.serving.errors import ApiError
from outpace.serving.offered import Offered
from outpace.serving.schemas import Common
from outpace.serving.service import Service

USUAL_LENGTH = 256
"""New tokens that are expected of a request that does not limit them."""
Read = Callable[[ChatTokenizer], Seq[int]]


def chosen_model(service: Service, asked: Common, length: int | None, read: Read) -> Offered:
    """The model of a request; of several the one whose answer is expected soonest.

    ``length``: new tokens that were asked for; ``read``: the prompt's ids for a tokenizer, of several prompts the
    first one's. Raises ApiError for a model that is not there, and for several where the method does not predict its
    time. May take a while where there are several.
    """
    if asked.model in service.offered or "," not in asked.model:
        return service.find(asked.model)
    greedy = asked.temperature == 0
    offers = [service.find(name) for name in dict.fromkeys(one.strip() for one in asked.model.split(","))]
    expected: list[tuple[float, Offered]] = []
    for offered in offers:
        method, prompt = offered.method(asked.speculation), read(offered.model.tokenizer)
        if not all(0 <= token < offered.model.target.vocab_size for token in prompt):
            return offered  # which refuses it, in words
        most = min(length or USUAL_LENGTH, offered.model.target.context_length)
        with ROUNDS, offered.model.target.round():
            seconds = method.drafter.expected_seconds(prompt, most, greedy=greedy)
        if seconds is None:
            raise ApiError(
                f"'model' names several, and method '{method.name}' does not predict which of them answers first; "
                f"name one model, or ask for a method that does, such as {', '.join(routers())}",
                param="model",
            )
        if len(prompt) < offered.model.target.context_length:
            expected.append((seconds, offered))
    return min(expected, key=lambda one: one[0])[1] if expected else offers[0]
