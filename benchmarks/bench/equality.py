"""Whether greedy outputs are those of transformers' plain decoding, and whether those that are not part at a tie."""

from collections.abc import Callable, Sequence

from benchmarks.bench.checkpoints import Dtype
from benchmarks.bench.streams import Row, Stream

# A smaller distance between the two best logits is a tie, where other shapes of a pass may choose otherwise: logits in
# bfloat16 are multiples of 1/8 from 16 on.
TIES: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.5}


def parting(stream: Stream, reference: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int | None:
    """Where a stream leaves the reference, as an index into that; None where it doesn't."""
    if stream.text:
        # A text that ends is cut by servers where a character is not complete, so a beginning is enough.
        whole = decode(reference).rstrip("\ufffd")
        if whole == stream.text.rstrip("\ufffd"):
            return None
        lengths = range(1, len(reference) + 1)
        return next(
            (n - 1 for n in lengths if not stream.text.startswith(decode(reference[:n]).rstrip("\ufffd"))), None
        )
    pairs = enumerate(zip(stream.tokens, reference, strict=False))
    at = next((index for index, (a, b) in pairs if a != b), None)
    if at is None and len(stream.tokens) != len(reference):
        return min(len(stream.tokens), len(reference) - 1)
    return at


def compare(
    streams: Sequence[Stream],
    references: Sequence[Sequence[int]],
    margins: Callable[[int, int], float],
    decode: Callable[[Sequence[int]], str],
    dtype: Dtype = "float32",
) -> Row:
    """How many outputs are equal, how many part at a tie, and how many otherwise.

    margins(prompt, position): the distance between the two best logits of the reference there.
    """
    places = [parting(stream, reference, decode) for stream, reference in zip(streams, references, strict=True)]
    parted = [margins(index, at) for index, at in enumerate(places) if at is not None]
    ties = sum(margin < TIES[dtype] for margin in parted)
    return {"equal": len(places) - len(parted), "ties": ties, "differing": len(parted) - ties}
