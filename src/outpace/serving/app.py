"""The routes of the HTTP server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence as Seq
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from outpace.core.errors import OutpaceError
from outpace.core.version import __version__
from outpace.models.base import ChatTokenizer
from outpace.serving.answers import ChatAnswers, CompletionAnswers
from outpace.serving.asked import Asked
from outpace.serving.chat import joined, offered_tools, prompt_ids, tool_parser
from outpace.serving.constrained import has_grammar
from outpace.serving.errors import ApiError, api_error
from outpace.serving.fields import refusal
from outpace.serving.guard import Guard, about, tenant_of
from outpace.serving.preparing import prepared
from outpace.serving.prompts import completion_prompts
from outpace.serving.schemas import ChatRequest, Common, CompletionRequest
from outpace.serving.service import Service
from outpace.serving.several_models import chosen_model
from outpace.serving.streaming import Answering, Streaming, error_response
from outpace.serving.tool_grammar import tool_grammar
from outpace.serving.web_page import add_page

MOST_BYTES = 4 * 1024 * 1024


def build_app(service: Service, *, most_bytes: int = MOST_BYTES, origins: Seq[str] = ()) -> FastAPI:
    """The ASGI application. ``origins``: web pages of these origins may use it from a browser; none by default."""
    app = FastAPI(title="outpace", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, tenants=service.tenants, most_bytes=most_bytes, refused=partial(_refused, service))
    if origins:
        app.add_middleware(CORSMiddleware, **cross_origin(origins))
    _errors(app, service)
    _texts(app, service)
    _about(app, service)
    add_page(app)
    return app


def cross_origin(origins: Seq[str]) -> dict[str, Any]:
    """Options of CORSMiddleware that let web pages of these origins use the API.

    Whatever headers they send: OpenAI's client for browsers adds a dozen of its own (``x-stainless-...``).
    """
    return {
        "allow_origins": list(origins),
        "allow_methods": ["GET", "POST"],
        "allow_headers": ["*"],
        "expose_headers": ["X-Request-Id", "Retry-After"],
    }


def _texts(app: FastAPI, service: Service) -> None:
    """Routes that decode."""

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: ChatRequest, request: Request) -> Response:
        tenant = tenant_of(request)
        if asked.max_tokens is not None and asked.max_completion_tokens is not None:
            raise ApiError("max_tokens and max_completion_tokens are the same limit; give one", param="max_tokens")
        if asked.top_logprobs and not asked.logprobs:
            raise ApiError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
        length = asked.max_completion_tokens if asked.max_tokens is None else asked.max_tokens
        ready = partial(prepared, tenant, request)
        async with service.preparation(tenant, asked.model):
            offered = await ready(
                lambda: chosen_model(
                    service, asked, length, lambda one: prompt_ids(one, asked, tool_parser(one, asked))
                )
            )
            tokenizer = offered.model.tokenizer
            logprobs = asked.top_logprobs or 0 if asked.logprobs else None
            references = (joined(asked.prediction.content),) if asked.prediction else ()
            parser = tool_parser(tokenizer, asked)
            tools = offered_tools(asked) if parser else []
            strict = any(one.function.strict for one in tools)
            demanding = has_grammar(asked) or bool(parser and parser.forced) or strict
            grammar = await ready(lambda: tool_grammar(tokenizer, tools, parser), grammar=demanding)
            ends_with = parser.format.ends_with if parser and not parser.parallel and grammar is None else ""
            what = Asked(tenant, asked, length, logprobs, references, ends_with, grammar)
            requests = await ready(
                lambda: service.requests(offered, what, [prompt_ids(tokenizer, asked, parser)], asked.n or 1),
                grammar=demanding,
            )
        usages = _usages(asked)
        job = service.admit(offered, tenant, requests, "chatcmpl", asked.n)
        answers = ChatAnswers(job, tokenizer, bool(asked.logprobs), usages, parser, counting=_counting(asked))
        return _respond(service, job, answers, what)

    @app.post("/v1/completions", response_model=None)
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        tenant = tenant_of(request)
        n = asked.n or 1
        best_of = n if asked.best_of is None else asked.best_of
        _check_best_of(asked, n, best_of)
        if asked.echo and asked.logprobs is not None:
            raise ApiError("log-probabilities of a prompt are not computed: leave out echo or logprobs", param="echo")
        logprobs = 0 if asked.logprobs is None and best_of > n else asked.logprobs
        what = Asked(tenant, asked, asked.max_tokens or 16, logprobs)
        usages = _usages(asked)

        def read(tokenizer: ChatTokenizer) -> tuple[list[list[int]], list[str]]:
            return completion_prompts(tokenizer, asked.prompt, echo=bool(asked.echo))

        ready = partial(prepared, tenant, request)
        async with service.preparation(tenant, asked.model):
            offered = await ready(lambda: chosen_model(service, asked, what.length, lambda one: read(one)[0][0]))
            tokenizer = offered.model.tokenizer
            prompts, texts = await ready(lambda: read(tokenizer))
            requests = await ready(
                lambda: service.requests(offered, what, prompts, best_of), grammar=has_grammar(asked)
            )
        job = service.admit(offered, tenant, requests, "cmpl", asked.n)
        shown = texts if asked.echo else None
        answers = CompletionAnswers(
            job,
            tokenizer,
            asked.logprobs is not None,
            usages,
            n,
            best_of,
            shown,
            counting=_counting(asked),
            ids=bool(asked.return_token_ids),
            as_ids=bool(asked.return_tokens_as_token_ids),
        )
        return _respond(service, job, answers, what)

    @app.post("/v1/embeddings", response_model=None)
    async def embed() -> Response:
        raise ApiError(
            "this server generates text and has no embeddings; use a server for an embedding model",
            code="unsupported_endpoint",
        )


def _check_best_of(asked: CompletionRequest, n: int, best_of: int) -> None:
    """Raise ApiError for a number of answers to choose from that makes no sense."""
    if best_of < n:
        raise ApiError("'best_of' must be at least n", param="best_of")
    if best_of > n and asked.stream:
        raise ApiError("which answer is the best is known at the end: 'best_of' cannot be streamed", param="best_of")
    if best_of > n and asked.num_beams is not None and asked.num_beams > 1:
        raise ApiError(
            "'best_of' chooses among samples, and 'num_beams' among beams: give one of them", param="best_of"
        )


def _about(app: FastAPI, service: Service) -> None:
    """Routes that tell of the server."""

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service, one) for one in service.offered]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        return _model(service, service.find(model).id)

    @app.get("/v1/requests/{job}/timeline")
    async def timeline(job: str, request: Request) -> dict[str, Any]:
        return {"id": job, "choices": service.timelines(tenant_of(request), job)}

    # Load balancers ask with HEAD, too.
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/ready", methods=["GET", "HEAD"], response_model=None)
    async def ready() -> Response:
        if service.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "shutting down"}, 503)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _errors(app: FastAPI, service: Service) -> None:
    def told(request: Request, error: ApiError) -> Response:
        _refused(service, error, request.scope)
        return error_response(error)

    async def own(request: Request, error: Exception) -> Response:
        return told(request, api_error(error))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return told(request, refusal(error.errors(), error.body))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        messages = {
            400: "the body cannot be read as JSON: it must be UTF-8, without numbers or nesting beyond all measure",
            404: f"there is no path {path}",
            405: f"{path} does not take {request.method}",
        }
        return told(request, ApiError(messages.get(error.status_code, str(error.detail)), error.status_code))

    async def defect(request: Request, error: Exception) -> Response:
        return told(request, _failed(service, error))

    handlers: list[tuple[type[Exception], Callable[[Request, Exception], Awaitable[Response]]]] = [
        (OutpaceError, own),
        (RequestValidationError, invalid),
        (HTTPException, http),
        (Exception, defect),
    ]
    for kind, handler in handlers:
        app.add_exception_handler(kind, handler)


def _refused(service: Service, error: ApiError, scope: Scope) -> None:
    """Count a request that was refused, and log it."""
    service.metrics.refuse(error.status)
    service.log.refusal(str(error), **about(error, scope))


def _failed(service: Service, error: BaseException) -> ApiError:
    """What a caller is told of an error; what is no refusal is written to the log."""
    if not isinstance(error, OutpaceError):
        service.log.failure("request failed", error)
    return api_error(error)


def _usages(asked: Common) -> bool:
    """Whether a stream ends with what was used."""
    if asked.stream_options is not None and not asked.stream:
        raise ApiError("'stream_options' needs 'stream': true", param="stream_options")
    options = asked.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise ApiError("'continuous_usage_stats' needs 'include_usage': true", param="stream_options")
    return options is not None and options.include_usage


def _counting(asked: Common) -> bool:
    """Whether every chunk of a stream has the tokens so far."""
    return asked.stream_options is not None and asked.stream_options.continuous_usage_stats


def _respond(service: Service, job: Any, answers: ChatAnswers | CompletionAnswers, what: Asked) -> Response:
    def failed(error: BaseException) -> ApiError:
        known = _failed(service, error)
        service.metrics.refuse(known.status)
        return known

    kind = Streaming if what.body.stream else Answering
    return kind(job, answers, lambda status: service.done(job, what.tenant, status), failed, usage=answers.usages)


def _model(service: Service, name: str) -> dict[str, Any]:
    offered = service.offered[name]
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "outpace",
        "max_model_len": offered.model.target.context_length,
        "speculation": {
            "method": offered.default_method,
            "methods": offered.methods,
            "lossy_methods": offered.lossy_methods,
        },
    }
