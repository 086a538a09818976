"""accelerate: a transformers model whose ``generate`` decodes speculatively, with the arguments of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outpace import loading
from outpace.acceptance.registry import configured_rule
from outpace.api.chosen import whole
from outpace.core.errors import BadInput
from outpace.core.turns import ROUNDS
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.engine.shared_decoder import Ticket
from outpace.integrations.transformers.generation_settings import Settings, check_arguments, merged
from outpace.integrations.transformers.ids_tokenizer import IdsTokenizer
from outpace.integrations.transformers.token_rows import attention_rows, input_rows, padded
from outpace.methods.default_method import DEFAULT_METHOD
from outpace.methods.named_weights import DraftModels, Heads
from outpace.models.tokenizers import HFTokenizer

if TYPE_CHECKING:
    from outpace.targets.choice import TargetKind

_OWN = {"_inner", "_model", "_method"}


def accelerate(
    hf_model: Any,
    tokenizer: Any = None,
    *,
    method: str | Method = DEFAULT_METHOD,
    settings: Mapping[str, Any] | None = None,
    rule: str | None = None,
    rule_settings: Mapping[str, Any] | None = None,
    draft_model: DraftModels = None,
    head: Heads = None,
    datastore: str | Path | None = None,
    target: TargetKind = "auto",
) -> AcceleratedModel:
    """Wrap a transformers model for code that calls ``model.generate(**inputs, ...)``: the same tokens, faster.

    hf_model: a decoder-only model of transformers, where it is to stay; it is put in evaluation mode.
    tokenizer: its tokenizer; needed for ``stop_strings``, draft models and trained heads.
    method, settings, rule, rule_settings, draft_model, head, datastore: how to draft, as for :func:`outpace.generate`.
    target: "auto" packs a copy of the weights for the fast target where it can; "generic" uses the model's own forward
        and follows changes of its weights.

    Returns an :class:`AcceleratedModel`. Raises BadInput when the model's state is not one that outpace can keep, and
    for a method that does not fit.

    >>> import outpace
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> tokenizer = AutoTokenizer.from_pretrained("folder")                                            # doctest: +SKIP
    >>> model = outpace.accelerate(AutoModelForCausalLM.from_pretrained("folder"), tokenizer)          # doctest: +SKIP
    >>> ids = model.generate(**tokenizer("The sea is", return_tensors="pt"), max_new_tokens=32)        # doctest: +SKIP
    """
    loaded = loading.load(hf_model, IdsTokenizer(hf_model) if tokenizer is None else tokenizer, target=target)
    with ROUNDS:
        judge = configured_rule(rule, rule_settings or {})
        built = loaded.method(method, settings, rule=judge, draft_model=draft_model, datastore=datastore, head=head)
    return AcceleratedModel(hf_model, loaded, built)


class AcceleratedModel:
    """A transformers model whose ``generate`` is outpace's. Everything else is the model's own.

    Made by :func:`accelerate`. ``isinstance`` sees the class of the model.
    """

    def __init__(self, inner: Any, model: Any, method: Method) -> None:
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_method", method)

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        synced_gpus: bool | None = None,
        assistant_model: Any = None,
        streamer: Any = None,
        negative_prompt_ids: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        custom_generate: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as transformers does: at temperature 0 the same ids.

        inputs: token ids (batch, length); or ``input_ids`` among ``kwargs``. Without either the answer begins with
            the beginning-of-sequence token.
        generation_config: a transformers GenerationConfig; what it leaves open is the model's own default.
        logits_processor: processors of transformers; they must be functions of the ids and scores they are given, for
            speculation asks about tokens that may be rejected.
        prefix_allowed_tokens_fn: as in transformers.
        streamer: is given the prompt, and then every token; for one row.
        stopping_criteria, synced_gpus, assistant_model, negative_prompt_ids, negative_prompt_attention_mask,
            custom_generate: refused where they ask for anything.
        kwargs: ``input_ids``, ``attention_mask`` (padding on the left), ``tokenizer``, and settings of a
            GenerationConfig: max_new_tokens, max_length, min_new_tokens, min_length, do_sample, temperature, top_k,
            top_p, min_p, num_beams, length_penalty, early_stopping, repetition_penalty, no_repeat_ngram_size,
            bad_words_ids, suppress_tokens, eos_token_id, pad_token_id, stop_strings, num_return_sequences,
            return_dict_in_generate and the like.

        Returns ids (rows, length), input ids and padding included, on the device of the input; with
        ``return_dict_in_generate`` an output object whose ``sequences`` they are; of beams it has their
        ``sequences_scores``. Beams of a method that drafts for one sequence are decoded without a draft. Sampled
        ids are drawn with torch's random numbers: ``torch.manual_seed`` repeats them. An answer also ends where the
        context does.

        Raises BadInput, in one line, for what it cannot honour exactly: sampled beams, stopping criteria, scores,
        hidden states, right padding and others, by name.

        >>> model.generate(**tokenizer(["One", "Two"], padding=True, return_tensors="pt"))  # doctest: +SKIP
        """
        check_arguments(
            {
                "stopping_criteria": stopping_criteria,
                "synced_gpus": synced_gpus,
                "assistant_model": assistant_model,
                "negative_prompt_ids": negative_prompt_ids,
                "negative_prompt_attention_mask": negative_prompt_attention_mask,
                "custom_generate": custom_generate,
            }
        )
        settings = merged(self._inner, generation_config, kwargs)
        others = dict(settings.model_inputs)
        self._learn_tokenizer(others.pop("tokenizer", None))
        ids = input_rows(inputs, others.pop("input_ids", None), settings, self._inner)
        mask = attention_rows(others.pop("attention_mask", None), ids, settings)
        check_arguments(others)
        requests = self._requests(settings, ids, mask, logits_processor, prefix_allowed_tokens_fn)
        if streamer is not None and settings.beams is not None:
            raise BadInput("streamer takes tokens as they come, and which beam is the answer is known at the end")
        if streamer is not None and len(requests) > 1:
            raise BadInput(f"streamer takes one row, and there are {len(requests)}; leave it out")
        answered = self._decoded(requests, streamer, ids)
        rows, scores = _answers(answered, settings)
        sequences = padded(ids.repeat_interleave(len(rows) // len(ids), 0), rows, settings.filling)
        if not settings.get("return_dict_in_generate"):
            return sequences
        from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

        if scores is None:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return GenerateBeamDecoderOnlyOutput(sequences=sequences, sequences_scores=torch.tensor(scores).to(ids.device))

    def _requests(
        self, settings: Settings, ids: Tensor, mask: Tensor, logits_processor: Any, prefix_allowed_tokens_fn: Any
    ) -> list[Request]:
        copies = whole("num_return_sequences", settings.get("num_return_sequences"), 1) or 1
        beams, method = settings.beams, self._method
        if beams is not None:
            if copies > beams.num_beams:
                raise BadInput(
                    f"num_return_sequences={copies} is more than num_beams={beams.num_beams}: a beam gives one"
                )
            copies = 1  # one request has all of a row's beams
            method = method if method.population is not None else self._model.method("none")
        elif copies > 1 and not settings.get("do_sample"):
            raise BadInput(
                f"num_return_sequences={copies} needs do_sample=True, or num_beams: greedy answers are all the same"
            )
        stops = settings.stop_strings
        if stops and isinstance(self._model.tokenizer, IdsTokenizer):
            raise BadInput(
                "stop_strings need the tokenizer: outpace.accelerate(model, tokenizer), or generate(tokenizer=)"
            )
        length = ids.shape[1]
        new = settings.new_tokens(length, self._model.target.context_length)
        found: list[Request] = []
        for row, kept in zip(ids.tolist(), mask.tolist(), strict=True):
            padding = tuple(row[: kept.index(1)])
            for _ in range(copies):
                # Torch's own numbers choose the seeds, so that torch.manual_seed repeats the answers.
                seed = int(torch.randint(2**48, ())) if settings.get("do_sample") else 0
                params = settings.sampling(
                    logits_processor, prefix_allowed_tokens_fn, length, length + new, padding, seed
                )
                found.append(
                    Request(
                        prompt=tuple(row[len(padding) :]),
                        method=method,
                        beams=beams,
                        params=params,
                        max_new_tokens=new,
                        stop_ids=frozenset(settings.ids("eos_token_id")),
                        stop_strings=stops,
                    )
                )
        return found

    def _decoded(self, requests: Sequence[Request], streamer: Any, ids: Tensor) -> list[Generation]:
        """Every request, answered."""
        news = SimpleQueue[tuple[Ticket, bool]]()

        def told(ticket: Ticket, piece: str | None) -> None:
            news.put((ticket, piece is None))

        if streamer is not None:
            streamer.put(ids.cpu())
        tickets = self._model.shared.submit([(one, told) for one in requests])
        streamed, left = 0, len(tickets)
        try:
            while left:
                ticket, ended = news.get()
                left -= ended
                if ended:
                    ticket.finished()
                if streamer is not None and ticket.generation is not None:
                    tokens = _new_tokens(ticket.generation)
                    for token in tokens[streamed:]:
                        streamer.put(torch.tensor([token]))
                    streamed = len(tokens)
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
        if streamer is not None:
            streamer.end()
        return [ticket.finished() for ticket in tickets]

    def _learn_tokenizer(self, tokenizer: Any) -> None:
        if tokenizer is not None and isinstance(self._model.tokenizer, IdsTokenizer):
            self._model.tokenizer = self._model.shared.tokenizer = HFTokenizer(tokenizer)

    def eval(self) -> AcceleratedModel:
        """The model is in evaluation mode already."""
        return self

    def to(self, *where: Any, **named: Any) -> AcceleratedModel:
        """Nothing, for the device that it is on; elsewhere it cannot go. Raises BadInput."""
        asked = [*where, *named.values()]
        if all(str(one) in (str(self._inner.device), str(self._inner.dtype)) for one in asked):
            return self
        raise BadInput("an accelerated model stays where it is; move the transformers model before outpace.accelerate")

    @property
    def __class__(self) -> type:
        return type(self._inner)

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of an accelerated model cannot be changed")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_inner"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._inner)})

    def __repr__(self) -> str:
        return f"AcceleratedModel({type(self._inner).__name__}, method={self._method.name!r})"


def _new_tokens(generation: Generation) -> list[int]:
    sequence = generation.sequence
    return sequence.tokens[sequence.prompt_length :]


def _answers(answered: Sequence[Generation], settings: Settings) -> tuple[list[list[int]], list[float] | None]:
    """The new tokens of every row that is returned, an end-of-sequence token included; and of beams their scores."""
    if settings.beams is None:
        return [_new_tokens(one) for one in answered], None
    count = settings.get("num_return_sequences") or 1
    for row, one in enumerate(answered):
        if len(one.hypotheses) < count:
            raise BadInput(
                f"row {row} has {len(one.hypotheses)} beams, fewer than num_return_sequences={count}: a processor or "
                "prefix_allowed_tokens_fn allows no more answers; lower num_return_sequences"
            )
    kept = [hypothesis for one in answered for hypothesis in one.hypotheses[:count]]
    return [list(one.tokens) for one in kept], [one.score for one in kept]
