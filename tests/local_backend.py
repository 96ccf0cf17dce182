"""One target replica in this process as a backend: serving without Ray."""

from collections.abc import AsyncGenerator

from cluster.chunk_queue import ChunkQueue
from cluster.target import TargetReplica
from engine.types import GenerationRequest, TokenChunk


class LocalBackend:
    """Implements Backend."""

    def __init__(self, replica: TargetReplica) -> None:
        self._replica = replica

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        """See Backend."""
        chunks = ChunkQueue(lambda: self._replica.cancel(request.request_id))
        self._replica.submit(request, chunks.put)
        finished = False
        try:
            while not finished:
                chunk = await chunks.get()
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            if not finished:
                self._replica.cancel(request.request_id)
