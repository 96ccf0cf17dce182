"""The public gRPC service over the shared validator and service: protobuf to fields, pieces to chunks, errors to codes.

Ray Serve's proxy cancels a method's task when its client goes away or its deadline passes; that ends the work.
"""

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from cluster.intake import Closed, Overloaded
from cluster.pb import generation_pb2 as pb
from deployments.fields import GenerationFields, UnknownModel, find_model, make_requests, validated
from deployments.grpc_methods import MAX_REQUEST_BYTES
from deployments.keys import ApiKeys, Unauthorized, bearer
from deployments.service import (
    DeadlineExceeded,
    GenerationFailed,
    Piece,
    ReplicaLost,
    ServedModel,
    Service,
    Unavailable,
)
from engine.types import GenerationRequest, Grammar, GrammarKind, InvalidRequest, TokenLogprobs, require

logger = logging.getLogger(__name__)


class _TooLarge(Exception):
    """A message is larger than it may be."""


_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (Unauthorized, grpc.StatusCode.UNAUTHENTICATED),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownModel, grpc.StatusCode.NOT_FOUND),
    (_TooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (ReplicaLost, grpc.StatusCode.UNAVAILABLE),
    (Closed, grpc.StatusCode.UNAVAILABLE),
    (GenerationFailed, grpc.StatusCode.INTERNAL),
)
_FINISH = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
_GRAMMARS: dict[int, GrammarKind] = {
    pb.ResponseFormat.KIND_JSON_OBJECT: "json_object",
    pb.ResponseFormat.KIND_JSON_SCHEMA: "json_schema",
}
# Fields that are the same in both, absent or not.
_OPTIONAL = (
    *("n", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "min_tokens", "logprobs", "window"),
)


class Context(Protocol):
    """What is needed of a call's context: Ray Serve's RayServegRPCContext, or grpc.aio's own."""

    def invocation_metadata(self) -> Any: ...

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...


class CallFailed(Exception):
    """A call ends with the code and details that its context was given."""


class GrpcMethods:
    """The methods of GenerationService; Ray Serve's ingress deployment is one. The parameters have the names Serve knows."""

    def __init__(
        self, models: Mapping[str, ServedModel], service: Service, keys: ApiKeys, max_bytes: int = MAX_REQUEST_BYTES
    ) -> None:
        """max_bytes: of a request; never more than MAX_REQUEST_BYTES."""
        self._models, self._service, self._keys = models, service, keys
        self._max_bytes = min(max_bytes, MAX_REQUEST_BYTES)

    async def Generate(self, request: bytes, grpc_context: Context) -> AsyncGenerator[pb.GenerateChunk]:
        """The chunks of all samples. Raises CallFailed."""
        arrived = time.monotonic()
        with _failing(grpc_context):
            salt = self._admit(grpc_context)
            message = _parse(pb.GenerateRequest, request, self._max_bytes)
            model = find_model(self._models, message.model or None)
            self._service.admit(model)
            fields = fields_of(message)
            make = partial(_make_requests, fields, model, salt)
            requests = await self._service.prepare(make, fields.grammar is not None, arrived)
            async with aclosing(self._service.run_all(model, requests, arrived=arrived)) as pieces:
                async for sample, piece in pieces:
                    yield chunk_of(sample, piece, requests[sample], model)

    async def ListModels(self, request: bytes, grpc_context: Context) -> pb.ListModelsResponse:
        """The models that are served. Raises CallFailed."""
        with _failing(grpc_context):
            self._admit(grpc_context)
            _parse(pb.ListModelsRequest, request, self._max_bytes)
            return pb.ListModelsResponse(models=[_described(model) for model in self._models.values()])

    def _admit(self, context: Context) -> bytes:
        """The salt of the client's tenant. Raises Unauthorized."""
        metadata = dict(context.invocation_metadata() or ())
        return self._keys.salt(bearer(metadata.get("authorization")))


@contextmanager
def _failing(context: Context) -> Iterator[None]:
    """Errors become a code and details for the client. Raises CallFailed for every one of them."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  the edge of the process: a client gets a code, never a stack trace
        code, details = _status(error)
        context.set_code(code)
        context.set_details(details)
        raise CallFailed(details) from None


def _status(error: Exception) -> tuple[grpc.StatusCode, str]:
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, str(error) or "no valid API key in the metadata `authorization: Bearer KEY`"
    logger.error("a call failed", exc_info=error)
    return grpc.StatusCode.INTERNAL, "an internal error"


def _parse(kind: Any, data: bytes, limit: int) -> Any:
    """A message of this kind. Raises InvalidRequest, or _TooLarge."""
    if len(data) > limit:
        raise _TooLarge(f"a request may have {limit} bytes")
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidRequest("request", "is not a valid message") from None


def fields_of(message: pb.GenerateRequest) -> GenerationFields:
    """The fields of a request, those that are absent with their defaults. Raises InvalidRequest."""
    which = message.WhichOneof("prompt")
    require(which is not None, "prompt", "must be text or tokens")
    values: dict[str, Any] = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    prompt = message.text if which == "text" else tuple(message.tokens.ids)
    lists = {name: tuple(getattr(message, name)) for name in ("stop", "bad_words", "documents")}
    ids = {"stop_token_ids": tuple(message.stop_token_ids), "logit_bias": dict(message.logit_bias)}
    values |= {"prompt": prompt, "model": message.model or None, "ignore_eos": message.ignore_eos, **lists, **ids}
    return validated(GenerationFields, {**values, "grammar": _grammar(message.response_format)})


def _grammar(wanted: pb.ResponseFormat) -> Grammar | None:
    known = wanted.kind in (pb.ResponseFormat.KIND_UNSPECIFIED, pb.ResponseFormat.KIND_TEXT, *_GRAMMARS)
    require(known, "response_format", "its kind is unknown")
    if wanted.kind not in _GRAMMARS:
        require(not wanted.schema, "response_format", "a schema needs KIND_JSON_SCHEMA")
        return None
    require(
        bool(wanted.schema) == (wanted.kind == pb.ResponseFormat.KIND_JSON_SCHEMA),
        "response_format",
        "KIND_JSON_SCHEMA needs a schema, no other kind takes one",
    )
    return Grammar(_GRAMMARS[wanted.kind], wanted.schema)


def _make_requests(fields: GenerationFields, model: ServedModel, salt: bytes) -> list[GenerationRequest]:
    try:
        return make_requests(fields, model, uuid.uuid4().hex, salt)
    except InvalidRequest as error:
        if error.param == "grammar":  # as the client calls it
            raise InvalidRequest("response_format", error.message) from None
        raise


def chunk_of(sample: int, piece: Piece, request: GenerationRequest, model: ServedModel) -> pb.GenerateChunk:
    """A piece as the client gets it; the last one with what the sample took."""
    chunk = pb.GenerateChunk(
        sample=sample,
        text=piece.text,
        token_ids=piece.tokens,
        logprobs=[_logprobs(each) for each in piece.logprobs],
    )
    if piece.finish_reason is not None and piece.speculation is not None:
        chunk.finish_reason = _FINISH[piece.finish_reason]
        stats = piece.speculation
        chunk.summary.prompt_tokens = len(request.prompt)
        chunk.summary.cached_prompt_tokens = piece.known
        chunk.summary.completion_tokens = stats.tokens
        chunk.summary.seed = request.params.seed
        chunk.summary.speculation.accepted_tokens = stats.accepted
        chunk.summary.speculation.steps = stats.steps
        chunk.summary.system_fingerprint = model.fingerprint
    return chunk


def _logprobs(each: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.TopToken(id=token, logprob=logprob) for token, logprob in each.top]
    return pb.TokenLogprobs(chosen=each.chosen, top=top)


def _described(model: ServedModel) -> pb.Model:
    return pb.Model(
        name=model.name,
        context=model.context,
        vocab_size=model.vocab_size,
        system_fingerprint=model.fingerprint,
        created=model.created,
    )
