"""One target replica in this process as a backend: serving without Ray, for tests and for a look around."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from cluster.target import TargetReplica
from engine.types import GenerationRequest, TokenChunk

MAX_CHUNKS = 4096  # that a slow reader may leave unread; the request is cancelled beyond


class LocalBackend:
    """Implements Backend."""

    def __init__(self, replica: TargetReplica) -> None:
        self._replica = replica

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        """See Backend."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[TokenChunk] = asyncio.Queue()
        behind = False  # from the first chunk on that found no room

        def sink(chunk: TokenChunk) -> None:
            nonlocal behind
            behind = behind or queue.qsize() >= MAX_CHUNKS
            if behind and chunk.finish_reason is None:
                self._replica.cancel(request.request_id)
                return
            if behind:
                chunk = TokenChunk(request.request_id, (), (), "error", "the reader fell behind")
            with suppress(RuntimeError):  # the reader's loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, chunk)

        self._replica.submit(request, sink)
        finished = False
        try:
            while not finished:
                chunk = await queue.get()
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            if not finished:
                self._replica.cancel(request.request_id)
