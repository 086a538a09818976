"""What a call of transformers' ``generate`` asks for: its arguments, the model's defaults, and what must be refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outpace.api.chosen import texts, whole
from outpace.api.processor_forms import read_processors
from outpace.core.errors import BadInput, shortened, shown
from outpace.core.processors import LogitsProcessor
from outpace.core.sampling import SamplingParams
from outpace.engine.populations.beam_options import BeamOptions

DEFAULT_NEW_TOKENS = 20
"""Of transformers, where neither the call nor the model says how long an answer may be."""
_HONOURED = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "stop_strings", "eos_token_id", "pad_token_id"),
    *("bos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p", "num_return_sequences"),
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    *("sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    *("return_dict_in_generate", "renormalize_logits", "remove_invalid_values"),
    *("num_beams", "length_penalty", "early_stopping"),
}
_WITHOUT_EFFECT = {
    # how transformers computes, drafts and stores: outpace does each in its own way, and the tokens are the same
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"),
    *("compile_config", "disable_compile", "continuous_batching_config", "use_mtp", "speculation_type"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "is_assistant", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit"),
    *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    # of beams and encoders alone
    *("diversity_penalty", "encoder_repetition_penalty"),
    *("encoder_no_repeat_ngram_size", "decoder_start_token_id", "transformers_version"),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beam_groups": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1, 1.0),
}
"""Values at which other settings ask for nothing; for all of them None and False do too."""
_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0, "num_return_sequences": 1}
"""Of transformers, for what neither the call nor the model sets."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one call, merged as transformers merges them: the call's own, then the model's defaults."""

    values: Mapping[str, Any]
    model_inputs: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """A setting, or None."""
        return self.values.get(name)

    def ids(self, name: str) -> tuple[int, ...]:
        """A setting that is a token id, or several."""
        value = self.get(name)
        if isinstance(value, Tensor):
            value = value.tolist()
        found = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
        wrong = next((one for one in found if isinstance(one, bool) or not isinstance(one, int)), None)
        if wrong is not None:
            raise BadInput(f"{name} must be a token id or a list of them, not {shown(wrong)}")
        return found

    @property
    def filling(self) -> int | None:
        """What fills rows that end early. For beams transformers takes a pad_token_id of 0 for none."""
        pad = [one for one in self.ids("pad_token_id")[:1] if one or self.beams is None]
        return next(iter((*pad, *self.ids("eos_token_id"), *self.ids("pad_token_id"))), None)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return texts("stop_strings", self.get("stop_strings"))

    @property
    def beams(self) -> BeamOptions | None:
        """Beam search; None: one sequence. Raises BadInput where beams are sampled: theirs are another distribution."""
        given = {name: self.get(name) for name in ("length_penalty", "early_stopping") if self.get(name) is not None}
        options = BeamOptions(self.get("num_beams") or 1, **given)
        if options.num_beams == 1:
            return None
        refused = {
            "do_sample": "its sampled beams are another distribution than outpace's (outpace.generate(num_beams=, "
            "temperature=)); leave do_sample out, or call transformers' own",
            "renormalize_logits": "log-probabilities of beams are not normalised again; leave it out, or call "
            "transformers' own",
        }
        for name, why in refused.items():
            if self.get(name):
                raise BadInput(f"generate cannot honour {name} with num_beams={options.num_beams}: {why}")
        return options

    def new_tokens(self, prompt: int, context: int) -> int:
        """The most tokens that a prompt of ``prompt`` tokens, padding included, may be given."""
        new = whole("max_new_tokens", self.get("max_new_tokens"), 1)
        length = whole("max_length", self.get("max_length"), 1)
        if new is not None:
            return new
        if length is None:
            return max(1, min(DEFAULT_NEW_TOKENS, context - prompt))
        if length <= prompt:
            raise BadInput(f"max_length={length} leaves no room behind {prompt} input ids; raise it")
        return length - prompt

    def sampling(
        self, given: Any, prefix_allowed_tokens_fn: Any, length: int, limit: int, padding: tuple[int, ...], seed: int
    ) -> SamplingParams:
        """Sampling parameters for a row of ``length`` input ids, of which ``padding`` are no part of the prompt.

        ``given``: the caller's logits processors. ``limit``: most tokens of the row in all.
        """
        own = self._processors(prefix_allowed_tokens_fn, length, limit, len(padding))
        penalty = 1.0 if own else float(self.get("repetition_penalty"))
        processors: tuple[LogitsProcessor, ...] = read_processors([*own, *_listed(given)], padding)
        if not self.get("do_sample"):
            return SamplingParams(repetition_penalty=penalty, processors=processors)
        if self.get("temperature") == 0:
            raise BadInput("temperature=0 does not sample; give do_sample=False, or a temperature above 0")
        return SamplingParams(
            temperature=1.0 if self.get("temperature") is None else self.get("temperature"),
            top_k=self.get("top_k") or 0,
            top_p=1.0 if self.get("top_p") is None else self.get("top_p"),
            min_p=self.get("min_p") or 0.0,
            repetition_penalty=penalty,
            processors=processors,
            seed=seed,
        )

    def _processors(self, prefix_allowed_tokens_fn: Any, length: int, limit: int, padded: int) -> list[Any]:
        """Those of transformers for its other settings, in its order; none where outpace's own penalty is enough."""
        import transformers as hf

        get, eos = self.get, list(self.ids("eos_token_id"))
        bias, fixed = get("sequence_bias"), get("forced_eos_token_id")
        wanted: list[tuple[Any, Callable[[], Any]]] = [
            (bias, lambda: hf.SequenceBiasLogitsProcessor(bias)),
            (get("no_repeat_ngram_size"), lambda: hf.NoRepeatNGramLogitsProcessor(get("no_repeat_ngram_size"))),
            (get("bad_words_ids"), lambda: hf.NoBadWordsLogitsProcessor(get("bad_words_ids"), eos or None)),
            (eos and get("min_length"), lambda: hf.MinLengthLogitsProcessor(get("min_length"), eos)),
            (
                eos and get("min_new_tokens"),
                lambda: hf.MinNewTokensLengthLogitsProcessor(length, get("min_new_tokens"), eos),
            ),
            (prefix_allowed_tokens_fn, lambda: hf.PrefixConstrainedLogitsProcessor(prefix_allowed_tokens_fn, 1)),
            (
                get("forced_bos_token_id") is not None,
                lambda: hf.ForcedBOSTokenLogitsProcessor(get("forced_bos_token_id")),
            ),
            (fixed is not None, lambda: hf.ForcedEOSTokenLogitsProcessor(limit, fixed)),
            (get("remove_invalid_values"), hf.InfNanRemoveLogitsProcessor),
            (
                get("exponential_decay_length_penalty"),
                lambda: hf.ExponentialDecayLengthPenalty(get("exponential_decay_length_penalty"), eos, length),
            ),
            (get("suppress_tokens"), lambda: hf.SuppressTokensLogitsProcessor(get("suppress_tokens"))),
            (
                get("begin_suppress_tokens"),
                lambda: hf.SuppressTokensAtBeginLogitsProcessor(get("begin_suppress_tokens"), length),
            ),
        ]
        found = [make() for asked, make in wanted if asked]
        if found and get("repetition_penalty") != 1.0:
            ignored = {"prompt_ignore_length": padded} if padded else {}
            penalty = hf.RepetitionPenaltyLogitsProcessor(float(get("repetition_penalty")), **ignored)
            found.insert(bool(bias), penalty)
        return found


def _listed(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def merged(model: Any, generation_config: Any, arguments: Mapping[str, Any]) -> Settings:
    """The settings of a call, and its other arguments. Raises BadInput, with the name, for what is not honoured."""
    from transformers import GenerationConfig

    unset = GenerationConfig().to_dict()
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise BadInput(f"generation_config must be a transformers.GenerationConfig, not {shown(generation_config)}")
    values: dict[str, Any] = {}
    for config in (model.generation_config, generation_config):
        if config is not None:
            values |= {key: value for key, value in config.to_dict().items() if value != unset.get(key)}
    known = {*unset, *_HONOURED, *_WITHOUT_EFFECT, *_NEUTRAL}
    values |= {key: value for key, value in arguments.items() if key in known}
    values = {**_DEFAULTS, **values}
    if values["repetition_penalty"] is None:
        values["repetition_penalty"] = 1.0
    for name, value in values.items():
        _check_setting(name, value)
    return Settings(values, {key: value for key, value in arguments.items() if key not in known})


def _check_setting(name: str, value: Any) -> None:
    if name.startswith("_") or name in _HONOURED or name in _WITHOUT_EFFECT or value is None or value is False:
        return
    if value not in _NEUTRAL.get(name, ()):
        hint = ": groups of beams are not built" if "beam" in name else ""
        raise BadInput(
            f"generate cannot honour {name}={shortened(repr(value), 40)}{hint}; leave it out, or call transformers' own"
        )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise BadInput for an argument of generate that asks for what outpace cannot do."""
    hints = {
        "stopping_criteria": "several tokens are decided at once; use max_new_tokens, stop_strings or eos_token_id",
        "assistant_model": "give outpace.accelerate a draft_model instead",
        "custom_generate": "it replaces the decoding that outpace does",
    }
    for name, value in arguments.items():
        if value is None or value is False or (isinstance(value, Sequence) and not value):
            continue
        hint = hints.get(name, "leave it out, or call transformers' own generate")
        raise BadInput(f"generate cannot honour {name}: {hint}")
