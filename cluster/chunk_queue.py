"""A request's chunks on their way from a replica's loop to a reader on an event loop."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from engine.types import TokenChunk

MAX_CHUNKS = 4096  # that a slow reader may leave unread; its request is cancelled beyond


class ChunkQueue:
    """Chunks in order, for the event loop that runs when it is made. A reader that falls behind gets an error in the end."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        """cancel: ends the request, whose last chunk still comes."""
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[TokenChunk] = asyncio.Queue()
        self._behind = False  # from the first chunk on that found no room

    def put(self, chunk: TokenChunk) -> None:
        """A Sink: from the replica's loop."""
        self._behind = self._behind or self._chunks.qsize() >= MAX_CHUNKS
        if self._behind and chunk.finish_reason is None:
            self._cancel()
            return
        if self._behind:
            chunk = TokenChunk(chunk.request_id, (), (), "error", "the reader fell behind")
        with suppress(RuntimeError):  # the reader's loop has ended
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)

    async def get(self) -> TokenChunk:
        """The next chunk, when it is there."""
        return await self._chunks.get()
