"""The gRPC stream between a target and a draft: its names and limits, for both ends."""

from dataclasses import dataclass

from cluster.pb import draft_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["DraftService"].full_name
METHOD = "Speculate"
PATH = f"/{SERVICE}/{METHOD}"
MAX_STREAMS = 64  # targets on one draft replica
PADDING = 1024  # by which vocabularies of models with one tokenizer may differ
VOCABULARY = "paceline-vocabulary"  # a header of the request: the tokens that the target's model knows
ACCEPTED = ("paceline-stream", "accepted")  # a header of the response to a stream that a link stands behind


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Limits of links over gRPC. Each end pings the other when the connection is silent."""

    max_streams: int = MAX_STREAMS
    keepalive_time_s: float = 1.0  # silence before a ping
    keepalive_timeout_s: float = 1.5  # from a ping until the link is dead
    vocab_size: int = 0  # both ends' have to be alike, but for PADDING; 0: any
    cores: tuple[int, ...] = ()  # of the threads that read: best those of the loop that they wake; empty: any
