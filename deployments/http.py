"""OpenAI's API over HTTP, as an ASGI application: what clients ask for, checked, run, and answered."""

import asyncio
import hashlib
import inspect
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from deployments import openai
from deployments import openai_answers as shapes
from deployments.answers import Answer, ChatAnswer, CompletionAnswer, Job
from deployments.asgi import (
    MAX_BODY,
    ClientGone,
    EventStream,
    first_event,
    id_headers,
    read_json,
    request_id,
    unless_gone,
)
from deployments.chat import TaggedCalls, WholeCall, chat_prompt, forced_call
from deployments.errors import FORESEEN, ApiError, ErrorBody, as_api_error
from deployments.fields import (
    GenerationFields,
    Sampling,
    draw_seed,
    find_model,
    make_requests,
    text_tokens,
    validated,
)
from deployments.keys import ApiKeys, bearer
from deployments.logprobs import TokenTexts
from deployments.service import Result, ServedModel, Service, Unavailable
from engine.types import GenerationRequest, InvalidRequest, require

Ready = Callable[[], bool | Awaitable[bool]]
BODIES = (openai.CompletionRequest, openai.ChatRequest, openai.TokenizeRequest, openai.DetokenizeRequest)
_CLIENT_GONE = 499
_OURS = {
    name: f"paceline.{name}" for name in ("window", "documents")
}  # fields of ours, by the names that the client knows


@dataclass(frozen=True)
class HttpSettings:
    """How the API is served."""

    api_keys: tuple[str, ...] = ()  # none: everybody may ask
    cors_origins: tuple[str, ...] = ()  # of pages whose scripts may ask; "*" for all
    max_body: int = MAX_BODY  # bytes


def make_app(
    models: Mapping[str, ServedModel],
    settings: HttpSettings | None = None,
    service: Service | None = None,
    ready: Ready = lambda: True,
) -> FastAPI:
    """The application. models: by the names that clients use; ready: whether a request could be answered now."""
    settings = settings or HttpSettings()
    app = FastAPI(
        title="Paceline",
        version=_version(),
        description="OpenAI's API, served by speculative decoding.",
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    api = Api(models, service or Service(), settings)
    app.include_router(_open_routes(ready))
    app.include_router(_guarded_routes(api))
    _handle_errors(app)
    if settings.cors_origins:
        origins = list(settings.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return app


class Api:
    """What is asked for, by route."""

    def __init__(self, models: Mapping[str, ServedModel], service: Service, settings: HttpSettings) -> None:
        self._models, self._service, self._max_body = models, service, settings.max_body
        self._keys = ApiKeys(settings.api_keys)
        self._texts: dict[str, TokenTexts] = {}  # by model

    async def authorize(self, request: Request) -> None:
        """Lets a request pass whose key is right; raises Unauthorized. The salt of its tenant is kept with it."""
        request.state.salt = self._keys.salt(bearer(request.headers.get("authorization")))

    async def list_models(self) -> shapes.ModelList:
        """The models that are served."""
        return shapes.ModelList(data=[_card(model) for model in self._models.values()])

    async def show_model(self, name: str) -> shapes.ModelCard:
        """One of them."""
        return _card(find_model(self._models, name))

    async def completions(self, request: Request) -> Response:
        """Continues prompts."""
        body, model = await self._asked(request, openai.CompletionRequest)
        with _named({"grammar": "response_format", **_OURS}):
            job, echo = await self._prepared(request, body, model, _completion_job, "cmpl")
        return await self._answer(request, body, CompletionAnswer(job, self._texts_of(model), echo))

    async def chat(self, request: Request) -> Response:
        """Goes on with a conversation."""
        body, model = await self._asked(request, openai.ChatRequest)
        limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        grammar = "response_format" if body.tool_choice in ("none", "auto") else "tools"
        with _named(
            {"prompt": "messages", "logprobs": "top_logprobs", "grammar": grammar, "max_tokens": limit, **_OURS}
        ):
            job = await self._prepared(request, body, model, _chat_job, "chatcmpl")
        readers = [_reader(body) for _ in job.requests]
        return await self._answer(request, body, ChatAnswer(job, self._texts_of(model), readers))

    async def tokenize(self, request: Request) -> Response:
        """A text, or a conversation, as token ids."""
        body = _parsed(openai.TokenizeRequest, await read_json(request, self._max_body))
        model = find_model(self._models, body.model)
        with _named({"prompt": "messages"} if body.messages is not None else {}):
            answer = await asyncio.to_thread(_tokenized, body, model)
        return Response(answer, media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Token ids as a text."""
        body = validated(openai.DetokenizeRequest, await read_json(request, self._max_body))
        model = find_model(self._models, body.model)
        known = all(0 <= token < model.vocab_size for token in body.tokens)
        require(known, "tokens", f"token ids must be between 0 and {model.vocab_size - 1}")
        text = await asyncio.to_thread(model.tokenizer.decode, list(body.tokens))
        return JSONResponse(shapes.Detokenized(prompt=str(text)).model_dump())

    async def _asked(self, request: Request, kind: type[Any]) -> tuple[Any, ServedModel]:
        """The body of a request, and its model. A lone model that is full refuses it unread."""
        if len(self._models) == 1:
            self._service.admit(next(iter(self._models.values())))
        values = await read_json(request, self._max_body)
        request.state.arrived = time.monotonic()
        body = _parsed(kind, values)
        model = find_model(self._models, body.model)
        self._service.admit(model)
        return body, model

    async def _prepared(
        self, request: Request, body: Any, model: ServedModel, make: Callable[..., Result], kind: str
    ) -> Result:
        """What is made of the body, on another thread: within the request's time, and while its client waits."""
        salt = _salted(request.state.salt, body.cache_salt)
        job = partial(make, f"{kind}-{request_id(request)}", body, model, salt)
        making = self._service.prepare(job, body.formed, request.state.arrived, body.paceline.timeout_s)
        return await unless_gone(request, making)

    async def _answer(
        self, request: Request, body: openai.CompletionRequest | openai.ChatRequest, answer: Answer
    ) -> Response:
        """Runs the job. Until there is something to say, or to be silent no longer, failures are statuses; in a stream they
        are events.
        """
        job = answer.job
        pieces = self._service.run_all(job.model, job.requests, body.paceline.timeout_s, request.state.arrived)
        if not body.stream:
            text = await unless_gone(request, answer.whole(pieces))
            return Response(text, media_type="application/json", headers=id_headers(request))
        events = answer.events(pieces)
        first = await first_event(request, events)
        known_by = request_id(request)
        return EventStream(first, events, lambda error: as_api_error(error, known_by).body, id_headers(request))

    def _texts_of(self, model: ServedModel) -> TokenTexts:
        return self._texts.setdefault(model.name, TokenTexts(model.tokenizer))


# --- from bodies to jobs


def _parsed(kind: type[Any], values: dict[str, Any]) -> Any:
    openai.refuse_unsupported(values)
    body = validated(kind, values)
    body.check()
    return body


@contextmanager
def _named(names: Mapping[str, str]) -> Iterator[None]:
    """Gives fields that are refused inside the names that the client knows."""
    try:
        yield
    except InvalidRequest as error:
        raise type(error)(names.get(error.param, error.param), error.message) from None


def _fields(body: openai.CompletionRequest | openai.ChatRequest, **given: Any) -> GenerationFields:
    sampling = {name: getattr(body, name) for name in Sampling.model_fields}
    ours = {"window": body.paceline.window, "documents": body.paceline.documents}
    return validated(GenerationFields, {**sampling, **ours, **given})


def _job(
    name: str,
    model: ServedModel,
    requests: list[GenerationRequest],
    body: openai.CompletionRequest | openai.ChatRequest,
) -> Job:
    stats = body.paceline.stats
    return Job(name, int(time.time()), model, requests, body.n, body.include_usage, stats)


def _completion_job(
    name: str, body: openai.CompletionRequest, model: ServedModel, salt: bytes
) -> tuple[Job, list[str]]:
    """The job, and what each text of it begins with. Raises InvalidRequest."""
    unique = uuid.uuid4().hex
    seed = draw_seed() if body.seed is None else body.seed
    given = {"max_tokens": body.max_tokens, "logprobs": body.logprobs, "grammar": body.grammar(), "seed": seed}
    requests, echo = [], []
    for at, prompt in enumerate(body.prompt):
        bare = isinstance(prompt, str) and not body.add_special_tokens
        read = text_tokens(str(prompt), model, add_special_tokens=False) if bare else prompt
        requests += make_requests(_fields(body, prompt=read, **given), model, f"{unique}-{at}", salt)
        written = prompt if isinstance(prompt, str) else str(model.tokenizer.decode(list(prompt)))
        echo += [written if body.echo else ""] * body.n
    return _job(name, model, requests, body), echo


def _chat_job(name: str, body: openai.ChatRequest, model: ServedModel, salt: bytes) -> Job:
    """Raises InvalidRequest."""
    tools = () if body.tool_choice == "none" else body.tools
    fields = _fields(
        body,
        prompt=chat_prompt(model, body.messages, tools, body.template_values, body.add_special_tokens),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=forced_call(body) or body.grammar(),
    )
    return _job(name, model, make_requests(fields, model, uuid.uuid4().hex, salt), body)


def _reader(body: openai.ChatRequest) -> TaggedCalls | WholeCall | None:
    if not body.tools or body.tool_choice == "none":
        return None
    return TaggedCalls(1 if not body.parallel_tool_calls else None) if body.tool_choice == "auto" else WholeCall()


def _tokenized(body: openai.TokenizeRequest, model: ServedModel) -> str:
    """The answer as JSON. Raises InvalidRequest."""
    special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
    if body.messages is not None:
        tokens = chat_prompt(model, body.messages, body.tools, body.template_values, special)
    else:
        tokens = text_tokens(body.prompt or "", model, special)
    answer = shapes.Tokenized(count=len(tokens), max_model_len=model.context, tokens=list(tokens))
    if body.return_token_strs:
        answer.token_strs = [str(token) for token in model.tokenizer.convert_ids_to_tokens(answer.tokens)]
    return answer.model_dump_json()


def _salted(tenant: bytes, salt: str) -> bytes:
    """The tenant's salt, or what it is together with one of the request's own."""
    return hashlib.sha256(tenant + b"/" + salt.encode("utf-8", "surrogatepass")).digest()[:16] if salt else tenant


def _card(model: ServedModel) -> shapes.ModelCard:
    return shapes.ModelCard(id=model.name, created=model.created, max_model_len=model.context)


# --- the application around them


def _open_routes(ready: Ready) -> APIRouter:
    """What is asked without a key."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """The server runs."""
        return {"status": "ok"}

    @router.get("/ready", responses={503: {"model": ErrorBody}})
    async def is_ready() -> dict[str, str]:
        """A request could be answered now."""
        answer = ready()
        if not (await answer if inspect.isawaitable(answer) else answer):
            raise Unavailable
        return {"status": "ready"}

    @router.get("/version")
    async def show_version() -> dict[str, str]:
        """Of Paceline."""
        return {"version": _version()}

    return router


def _guarded_routes(api: Api) -> APIRouter:
    """What is asked with a key, where keys are configured."""
    router = APIRouter(dependencies=[Depends(api.authorize)], responses={"4XX": {"model": ErrorBody}})
    router.add_api_route("/v1/models", api.list_models)
    router.add_api_route("/v1/models/{name:path}", api.show_model)
    posts = {
        "/v1/completions": (api.completions, openai.CompletionRequest, shapes.Completion),
        "/v1/chat/completions": (api.chat, openai.ChatRequest, shapes.ChatCompletion),
        "/tokenize": (api.tokenize, openai.TokenizeRequest, shapes.Tokenized),
        "/detokenize": (api.detokenize, openai.DetokenizeRequest, shapes.Detokenized),
    }
    for path, (handler, body, answer) in posts.items():
        schema = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
        extra = {"requestBody": {"required": True, "content": {"application/json": schema}}}
        router.add_api_route(path, handler, methods=["POST"], responses={200: {"model": answer}}, openapi_extra=extra)
    return router


def _handle_errors(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        return as_api_error(error, request_id(request)).response(id_headers(request))

    async def nobody(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_GONE)

    async def refuse(request: Request, error: Exception) -> Response:
        return ApiError(400, "the address or its query is not as documented").response(id_headers(request))

    for kind in (*FORESEEN, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(RequestValidationError, refuse)
    app.add_exception_handler(ClientGone, nobody)
    app.add_exception_handler(ClientDisconnect, nobody)


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document: bodies are read by hand, so their schemas are added here."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, bodies = models_json_schema(
        [(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}"
    )
    schemas = document["components"]["schemas"]
    document["components"]["schemas"] = {**bodies["$defs"], **schemas}
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # never sent
    return document


def _version() -> str:
    try:
        return version("paceline")
    except PackageNotFoundError:
        return "not installed"
