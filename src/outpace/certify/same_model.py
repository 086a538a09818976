"""Is the reference of the same model as the endpoint? Bad input, rather than a bias, where it is not.

Requests for one token draft nothing, so their probabilities are those of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from outpace.certify.endpoint import Endpoint, distance
from outpace.certify.near_ties import NEAR_TIE, prefilled
from outpace.certify.rescoring import largest_distance
from outpace.certify.server_client import Prompt
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.model import Model
from outpace.models.base import ChatTokenizer

_PROMPTS = 8
_SAMPLE = "Hello, World! 12345 naïve café: 3.14 != x[0]\n\tdef f(): return 'ok'"
_TOLERANCE = largest_distance(NEAR_TIE["bfloat16"], SamplingParams(temperature=1.0))


def check_same_model(endpoint: Endpoint, baseline: Endpoint, prompts: Sequence[Prompt]) -> None:
    """Raise BadInput for a baseline whose probabilities after the prompts are others."""
    few = prompts[:_PROMPTS]
    apart = median(distance(endpoint.next_token(one), baseline.next_token(one)) for one in few)
    if apart > _TOLERANCE:
        raise BadInput(
            f"{baseline.server.where} has other weights than {endpoint.server.where}: the probabilities of the first "
            f"token, where nothing is drafted, are {apart:.2g} apart (total variation)"
        )


def check_same_weights(endpoint: Endpoint, model: Model, prompts: Sequence[Prompt], params: SamplingParams) -> float:
    """How far the target's probabilities are from the endpoint's after the prompts, at most, at the temperature of
    ``params``. Raises BadInput for other weights."""
    found = []
    for prompt in prompts[:_PROMPTS]:
        top = endpoint.next_token(prompt)
        with prefilled(model.target, list(map(int, prompt)), (), SamplingParams()) as sequence:
            logits = model.target.score([(sequence, TokenTree())])[0].logits[0].double()
        own = logits.log_softmax(-1)
        listed = {token: float(own[int(token)]) for token in top}
        found.append((distance(top, listed), distance(top, listed, params.temperature or 1.0)))
    apart = median(one for one, _ in found)
    if apart > _TOLERANCE:
        raise BadInput(
            f"--target-model '{model.name}' has other weights than {endpoint.server.where}: the probabilities of the "
            f"first token, where nothing is drafted, are {apart:.2g} apart (total variation)"
        )
    return max(tempered for _, tempered in found)


def check_tokenizer(endpoint: Endpoint, tokenizer: ChatTokenizer) -> None:
    """Raise BadInput for a tokenizer that writes a text in other tokens than the endpoint's."""
    own = tokenizer.encode(_SAMPLE)
    fields = {"temperature": 0.0}
    if endpoint.has_ids:
        fields |= {"return_token_ids": True}
    answer = endpoint.server.raw(_SAMPLE, 1, **fields)
    ids = answer["choices"][0].get("prompt_token_ids") if endpoint.has_ids else None
    count = (answer.get("usage") or {}).get("prompt_tokens")
    if (ids is not None and list(ids) != own) or (ids is None and count is not None and count != len(own)):
        theirs = f"{len(ids)} tokens, {list(ids)[:4]} ..." if ids is not None else f"{count} tokens"
        raise BadInput(
            f"the tokenizer of --target-model is not that of {endpoint.server.where}: a text of {len(own)} tokens, "
            f"{own[:4]} ..., has {theirs} there"
        )
