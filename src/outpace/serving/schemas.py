"""The bodies of requests: every field is honoured or refused, none is ignored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from outpace.serving.fields import AtMost, Fields

MOST_CHOICES = 128
_CACHED = "beginnings of prompts are cached by themselves, and stay for as long as there is room"
_TEXT_ONLY = "this server reads and writes text only"
_OF_COMPLETIONS = "it belongs to /v1/completions"

Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=2**31)]
Stop = str | Annotated[list[Text], Field(max_length=16)]
# Of a list without a bound the first wrong entry is enough: a body has room for a million, and each error takes memory.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class StreamOptions(Fields):
    """``stream_options``. ``continuous_usage_stats``, as vLLM names it: all chunks have the counts so far."""

    NEUTRAL = {"include_obfuscation": (False,)}  # noqa: RUF012
    REFUSED = {"include_obfuscation": "chunks are not padded; send false"}  # noqa: RUF012

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculation(Fields):
    """How this request drafts, instead of the server's defaults: an extension of the API.

    ``rule``: an acceptance rule, a lossy one too, with its settings ``rule_params``.
    ``namespace``: of the tenant's own; what the method learns is kept there for later requests that name it.
    ``trace``: every choice tells who drafted each of its tokens.
    """

    method: Text | None = None
    params: dict[str, Any] = Field(default_factory=dict, max_length=32)
    rule: Text | None = None
    rule_params: dict[str, Any] = Field(default_factory=dict, max_length=32)
    off: bool = False
    namespace: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    trace: bool = False


class Common(Fields):
    """What chats and completions share."""

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    stop: Stop | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], AtMost(1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # What answers must look like (:mod:`outpace.serving.constrained`): OpenAI's field, and vLLM's.
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Field(fail_fast=True)] | None = Field(default=None, max_length=10_000)
    guided_grammar: Text | None = None
    structured_outputs: dict[str, Any] | None = None
    constraint_weighting: Text | None = None
    # Further extensions; the first five as vLLM names them.
    top_k: int | None = Field(default=None, ge=-1, le=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=256)
    ignore_eos: bool | None = None
    num_return_sequences: int | None = Field(default=None, ge=1, le=MOST_CHOICES)  # transformers' name of n
    # Beam search, as transformers names it: n of the beams are the choices.
    num_beams: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    length_penalty: float | None = Field(default=None, ge=-100, le=100)
    early_stopping: bool | Literal["never"] | None = None
    priority: int | None = Field(default=None, ge=-100, le=100)
    speculation: Speculation | None = None
    shared_prefix: Annotated[str, Field(min_length=1, max_length=200)] | None = None

    @model_validator(mode="after")
    def _one_count(self) -> Self:
        if self.num_return_sequences is not None:
            if self.n not in (None, self.num_return_sequences):
                reason = "'n' and 'num_return_sequences' are two names of one number; send one of them"
                raise PydanticCustomError("refused", "{reason}", {"reason": reason, "field": "num_return_sequences"})
            self.n = self.num_return_sequences
        return self


class TextPart(Fields):
    """A part of a message. Images, audio, video and files are refused."""

    REFUSED = {  # noqa: RUF012
        "prompt_cache_breakpoint": _CACHED,
        "image_url": _TEXT_ONLY,
        "input_audio": _TEXT_ONLY,
        "video_url": _TEXT_ONLY,
        "file": _TEXT_ONLY,
        "refusal": "answers here have none",
    }
    NEUTRAL = {"prompt_cache_breakpoint": ({"mode": "explicit"},)}  # noqa: RUF012 - every beginning is cached

    type: Literal["text"]
    text: str


class CalledFunction(Fields):
    """What an earlier answer called; ``arguments`` is JSON in a text."""

    name: Text
    arguments: str


class ToolCall(Fields):
    """A call in an earlier answer."""

    NEUTRAL = {"index": tuple(range(MOST_CHOICES))}  # noqa: RUF012 - clients send a streamed call's back

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Fields):
    """One message. The fields of answers that are always empty here may be sent back."""

    REFUSED = {"audio": _TEXT_ONLY, "function_call": "use tool_calls", "refusal": "answers here have none"}  # noqa: RUF012
    NEUTRAL = {"refusal": ("",), "annotations": ([],)}  # noqa: RUF012

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None


class FunctionTool(Fields):
    """A function that the model may call. ``parameters``: a JSON schema, to which ``strict`` holds the arguments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """An entry of ``tools``."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(Fields):
    """Which function."""

    name: Text


class NamedTool(Fields):
    """``tool_choice``, or an entry of ``allowed_tools``: this function."""

    type: Literal["function"]
    function: FunctionName

    @property
    def functions(self) -> list[FunctionName]:
        """The functions that are named."""
        return [self.function]


class Allowance(Fields):
    """``allowed_tools``: the tools that may be called; with ``required``, one of them has to be."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=128)


class AllowedTools(Fields):
    """``tool_choice``: some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowance

    @property
    def functions(self) -> list[FunctionName]:
        """The functions that are named."""
        return [one.function for one in self.allowed_tools.tools]


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]


class PredictedText(Fields):
    """``prediction``: text that the answer probably repeats; drafters may copy from it."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]


class ChatRequest(Common):
    """The body of POST /v1/chat/completions."""

    REFUSED: ClassVar = {
        "audio": _TEXT_ONLY,
        "modalities": _TEXT_ONLY,
        "functions": "use tools",
        "function_call": "use tool_choice",
        "reasoning_effort": "the model's reasoning has no levels",
        "verbosity": "the length of answers has no levels; use max_completion_tokens, or ask for it in the prompt",
        "web_search_options": "this server does not search the web",
        "store": "answers are not stored",
        "moderation": "texts are not moderated",
        "prompt_cache_options": _CACHED,
        "prompt_cache_retention": _CACHED,
        "service_tier": "there is one tier; send auto or default, or leave it out",
        "best_of": "use n, and choose among the choices; or num_beams",
        "prompt": _OF_COMPLETIONS,
        "echo": _OF_COMPLETIONS,
        "suffix": _OF_COMPLETIONS,
    }
    NEUTRAL: ClassVar = {
        "modalities": (["text"],),
        "prompt_cache_options": ({"mode": "implicit"},),
        "prompt_cache_retention": ("in_memory",),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "store": (False,),
        "service_tier": ("auto", "default"),
    }

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: PredictedText | None = None
    metadata: Annotated[dict[str, str], AtMost(16)] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class CompletionRequest(Common):
    """The body of POST /v1/completions. ``prompt``: a text, token ids, or a list of either."""

    REFUSED: ClassVar = {
        "suffix": "the model continues texts and does not fill gaps",
        "messages": "it belongs to /v1/chat/completions",
        "tools": "it belongs to /v1/chat/completions",
        "max_completion_tokens": "here its name is max_tokens",
        "top_logprobs": "here logprobs is the number of alternatives",
    }
    NEUTRAL: ClassVar = {"suffix": ("",)}

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    # Extensions, as vLLM names them: the ids of the tokens, also as the names that logprobs gives them.
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
