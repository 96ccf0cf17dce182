"""Bodies in, events out: what HTTP asks for beside the answers themselves."""

import asyncio
import json
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.errors import ApiError

MAX_BODY = 4 * 1024 * 1024  # bytes
_READ_ON = (
    16  # of a body that is too large, so many times the limit are read: else its sender would never see the answer
)
_READ_S = 60.0  # for a body
SILENT_S = 10.0  # before a stream begins, and between two looks whether it has said something
_COMMENT = b": waiting\n\n"
_REQUEST_ID = "X-Request-Id"
_SOUND_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_JSON = "application/json"

Result = TypeVar("Result")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The object in a request's body. Raises ApiError: 413 before anything is parsed, 415, or 400."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    plain = request.headers.get("content-encoding", "identity").lower() == "identity"
    body = await _read(request, limit)
    if kind != _JSON or not plain:
        raise ApiError(415, f"the body must be {_JSON}, not compressed", code="unsupported_media_type")
    try:
        values = pydantic_core.from_json(body)  # at most 200 levels deep
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return values


async def _read(request: Request, limit: int) -> bytes:
    """At most `limit` bytes; raises ApiError."""
    too_large = ApiError(413, f"the body has more than {limit} bytes", code="body_too_large")
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit and "expect" in request.headers:
        raise too_large  # nothing was sent yet
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_READ_S):
            async for part in request.stream():
                size += len(part)
                parts.append(part)
                if size > limit:
                    parts.clear()
                if size > _READ_ON * limit:
                    break
    except TimeoutError:
        raise too_large if size > limit else ApiError(408, "the body took too long", "timeout_error") from None
    if size > limit:
        raise too_large
    return b"".join(parts)


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes away: raises ClientGone."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _end(working, gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels them, and waits until they are over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def first_event(request: Request, events: AsyncGenerator[str]) -> "asyncio.Future[str]":
    """The first event, which is there unless it takes SILENT_S. Raises what comes in its place until then, or ClientGone.

    When it raises, the generator is closed.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await unless_gone(request, asyncio.wait({first}, timeout=SILENT_S))
        if first.done():
            first.result()
    except BaseException:
        await _end(first)
        await events.aclose()
        raise
    return first


class EventStream(Response):
    """Server-sent events. `[DONE]` comes after success only; a failure is an event of its own.

    While there is nothing to say, comments are sent, which clients skip: what stands between hangs up on silence.
    However it ends, the events' generator is closed: when the client goes away, too.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: "asyncio.Future[str]",
        events: AsyncGenerator[str],
        on_error: Callable[[Exception], dict[str, Any]],
        headers: Mapping[str, str],
    ) -> None:
        """first: the first event. on_error: the event for a failure."""
        super().__init__(None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._first, self._events, self._on_error = first, events, on_error
        self._spoke = False  # since the last comment was due

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Response."""
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(sending, gone)
            await _end(self._first)
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        breathing = asyncio.ensure_future(self._breathe(send))
        try:
            await self._say(send, _event(await self._first))
            async for data in self._events:
                await self._say(send, _event(data))
            last = "[DONE]"
        except Exception as error:  # noqa: BLE001  the edge of the process: it is told to the client
            last = json.dumps(self._on_error(error))
        finally:
            await _end(breathing)
        await send({"type": "http.response.body", "body": _event(last), "more_body": False})

    async def _say(self, send: Send, data: bytes) -> None:
        self._spoke = True
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _breathe(self, send: Send) -> None:
        while True:
            if not self._spoke:
                await self._say(send, _COMMENT)
            self._spoke = False
            await asyncio.sleep(SILENT_S)


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def request_id(request: Request) -> str:
    """What it is known by, in answers and logs: as its client or a proxy calls it, else a new one."""
    given = request.headers.get(_REQUEST_ID, "")
    if not hasattr(request.state, "request_id"):
        request.state.request_id = given if _SOUND_ID.fullmatch(given) else uuid.uuid4().hex
    return str(request.state.request_id)


def id_headers(request: Request) -> dict[str, str]:
    """The header that tells it. Where the request had one, Serve's proxy answers with that, which may be its own."""
    return {} if _REQUEST_ID in request.headers else {_REQUEST_ID: request_id(request)}
