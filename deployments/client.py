"""A client of the gRPC API: needs grpcio, protobuf and cluster/pb only.

    with Client("localhost:9000") as client:
        for chunk in client.generate("def add(", max_tokens=64, temperature=0):
            ...  # chunk.text, chunk.token_ids, chunk.finish_reason; chunk.summary in the last one of a sample

Closing the iterator, or dropping it, stops the work. Errors are grpc.RpcError, with `code()` and `details()`.
"""

from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from cluster.pb import generation_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
_OPTIONS = [("grpc.max_receive_message_length", -1)]  # what we asked for may be long


class Client:
    """A connection to a server; may be used from several threads."""

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        application: str | None = None,
        tls: grpc.ChannelCredentials | None = None,
    ) -> None:
        """address: "host:port". application: of Ray Serve, where there are several.

        tls: for a gateway that ends it, grpc.ssl_channel_credentials() with the certificates it needs; None: not encrypted.
        """
        self.address = address
        given = {"application": application, "authorization": f"Bearer {api_key}" if api_key is not None else None}
        self._metadata = tuple((name, value) for name, value in given.items() if value is not None)
        self._channel = (
            grpc.secure_channel(address, tls, options=_OPTIONS)
            if tls
            else grpc.insecure_channel(address, options=_OPTIONS)
        )
        self._generate: grpc.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateChunk] = (
            self._channel.unary_stream(
                f"/{_SERVICE}/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateChunk.FromString,
            )
        )
        self._list: grpc.UnaryUnaryMultiCallable[pb.ListModelsRequest, pb.ListModelsResponse] = (
            self._channel.unary_unary(
                f"/{_SERVICE}/ListModels",
                request_serializer=pb.ListModelsRequest.SerializeToString,
                response_deserializer=pb.ListModelsResponse.FromString,
            )
        )

    def generate(
        self, prompt: str | Sequence[int], timeout_s: float | None = None, **fields: Any
    ) -> Generator[pb.GenerateChunk]:
        """The chunks of the outputs of a prompt, text or token ids. The call begins when the first chunk is asked for.

        timeout_s: deadline of the whole call. fields: those of GenerateRequest, such as model, max_tokens, seed.
        Raises grpc.RpcError, or ValueError or TypeError for a field that doesn't exist or has another type.
        """
        call = self._generate(make_request(prompt, fields), timeout=timeout_s, metadata=self._metadata)
        try:
            yield from call
        finally:
            call.cancel()

    def list_models(self, timeout_s: float | None = None) -> list[pb.Model]:
        """The models that can be named. Raises grpc.RpcError."""
        return list(self._list(pb.ListModelsRequest(), timeout=timeout_s, metadata=self._metadata).models)

    def close(self) -> None:
        """Ends the connection, and every call on it."""
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def make_request(prompt: str | Sequence[int], fields: Mapping[str, Any]) -> pb.GenerateRequest:
    """A request for the outputs of text or token ids."""
    if isinstance(prompt, str):
        return pb.GenerateRequest(text=prompt, **fields)
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=prompt), **fields)
