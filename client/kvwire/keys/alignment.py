from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

from kvwire.errors import AlignmentInvalid, AlignmentTooLarge, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT_MAX_CHUNK_SIZE = 65_536


def required_alignment(spans: Iterable[int]) -> int:
    """What every chunk boundary must be a multiple of: the least common multiple of the KV groups' spans.

    A span is what one block of a group covers, in tokens. Scratch groups have none (0) and are left out.
    Raises AlignmentInvalid for a negative span, and when no cacheable group is left.
    """
    cacheable = [span for span in spans if span != 0]
    for span in cacheable:
        if span < 0:
            raise AlignmentInvalid(f"A KV group cannot span {span} tokens: spans are positive.", span=span)
    if not cacheable:
        raise AlignmentInvalid("No KV group of this model can be cached: every group is a scratch group.")
    return lcm(*cacheable)


def final_chunk_size(minimum: int, alignment: int, maximum: int = DEFAULT_MAX_CHUNK_SIZE) -> int:
    """The smallest multiple of `alignment` that is at least `minimum`, all in tokens.

    Raises AlignmentInvalid for an alignment below 1, AlignmentTooLarge for a result above `maximum`.
    """
    if minimum < 1:
        raise InvalidArgument("minimum", f"{minimum} is not a chunk size: it must be at least 1 token")
    if alignment < 1:
        raise AlignmentInvalid(
            f"Required alignment {alignment} is invalid: send the least common multiple of the spans of the "
            "cacheable KV groups, at least 1 token.",
            alignment=alignment,
        )
    size = -(-minimum // alignment) * alignment
    if size > maximum:
        raise AlignmentTooLarge(
            f"Alignment {alignment} with the minimum chunk size {minimum} needs chunks of {size} tokens, "
            f"above the limit of {maximum}: raise --max-chunk-size, or use block sizes that share factors.",
            alignment=alignment,
            minimum=minimum,
            chunk_size=size,
            maximum=maximum,
        )
    return size
