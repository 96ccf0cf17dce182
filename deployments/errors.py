"""Errors in OpenAI's shape, for every status. Texts are for clients: no stack traces, addresses or file names."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from cluster.intake import Closed, Overloaded
from deployments.fields import ContextExceeded, UnknownModel
from deployments.keys import Unauthorized
from deployments.service import DeadlineExceeded, GenerationFailed, ReplicaLost, Unavailable
from engine.types import InvalidRequest

logger = logging.getLogger(__name__)
RETRY_AFTER_S = 1  # what clients that were refused are told to wait


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None  # the field of the request that is wrong
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


@dataclass
class ApiError(Exception):
    """An error with its HTTP status."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        return ErrorBody(error=ErrorDetail(**{k: getattr(self, k) for k in ErrorDetail.model_fields})).model_dump()

    def response(self, headers: Mapping[str, str]) -> JSONResponse:
        """The answer, with these headers too."""
        return JSONResponse(self.body, self.status, {**self.headers, **headers})


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """The error that a client gets; what nobody foresaw is logged, by the request's id, and told without details."""
    later = {"Retry-After": str(RETRY_AFTER_S)}
    match error:
        case ApiError():
            return error
        case ContextExceeded():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case InvalidRequest():
            return ApiError(400, str(error), param=error.param)
        case UnknownModel():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case Unauthorized():
            headers = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, "no valid API key was sent", code="invalid_api_key", headers=headers)
        case DeadlineExceeded():
            return ApiError(408, str(error), "timeout_error", code="deadline_exceeded")
        case Overloaded():
            return ApiError(429, "too many requests are waiting", "rate_limit_error", code="overloaded", headers=later)
        case Unavailable() | ReplicaLost() | Closed():
            return ApiError(503, "no replica can take requests now", "server_error", code="unavailable", headers=later)
        case GenerationFailed():
            return ApiError(500, str(error), "server_error", code="generation_failed")
        case HTTPException():
            return ApiError(
                error.status_code, HTTPStatus(error.status_code).phrase.lower(), headers=error.headers or {}
            )
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, "the server failed to answer", "server_error", code="internal_error")


FORESEEN: tuple[type[Exception], ...] = (  # what `as_api_error` knows
    *(ApiError, HTTPException, InvalidRequest, UnknownModel, Unauthorized),
    *(DeadlineExceeded, Overloaded, Unavailable, ReplicaLost, Closed, GenerationFailed),
)
