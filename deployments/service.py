"""What serving is, whatever the protocol: models by name, and something that runs their requests.

HTTP and gRPC both end here; Ray Serve, or one replica in this process, stands behind `Backend`.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerFast

from engine.types import GenerationRequest, TokenChunk


class ReplicaLost(RuntimeError):
    """The target that ran a request is gone: the request can go on elsewhere with the tokens received so far."""


class Backend(Protocol):
    """Runs the requests of one model."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """The chunks of a request; closing the iterator cancels it within one step.

        Raises InvalidRequest, Overloaded, Closed or ReplicaLost.
        """


@dataclass(frozen=True)
class ServedModel:
    """A model that clients can name."""

    name: str
    tokenizer: PreTrainedTokenizerFast
    context: int  # tokens, prompt and output together
    vocab_size: int
    fingerprint: str  # of everything that shapes its outputs: OpenAI's system_fingerprint
    created: int  # seconds since 1970
    backend: Backend
