"""What is asked of another server, and what makes its answer a good one."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final

from kvwire.errors import IncarnationStale, TransferFailed
from kvwire.server import convert
from kvwire.server.layout import layout_digest
from kvwire.serving.version import PROTOCOL_VERSIONS
from kvwire.transfer import tags
from kvwire.transfer.checksum import CHECKSUM_BYTES
from kvwire.transfer.tags import Kind
from kvwire.v1 import namespace_pb2
from kvwire.v1 import peer_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.server.layout import ShardMap
    from kvwire.server.peers.members import PeerInfo, Place
    from kvwire.server.store import Space
    from kvwire.v1 import transfer_pb2

MIN_PIECE: Final = 4096
MAX_PIECE: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Lent:
    """One object of a ticket."""

    size: int
    first_tag: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Ticket:
    """Checked. `objects` by chunk of the prompt and shard. `lease_id` is 0 when nothing was lent."""

    lease_id: int = 0
    path: str = ""
    piece_bytes: int = 0
    address: bytes = b""
    objects: dict[tuple[int, int], Lent] | None = None


class TransferIds:
    """Numbers for the tags, never the same one twice, and others after each restart."""

    def __init__(self) -> None:
        self._numbers = count(secrets.randbelow(tags.MAX_LEASE))

    def next(self) -> int:
        return next(self._numbers) % tags.MAX_LEASE + 1


def question(
    own_id: str,
    peer: PeerInfo,
    space: Space,
    keys: Sequence[bytes],
    masks: Sequence[int],
    transfer_id: int,
    offers: Sequence[transfer_pb2.DataPathOffer],
) -> pb.LookupAndLeaseRequest:
    width = (space.shards.num_shards + 7) // 8
    last = max((index + 1 for index, mask in enumerate(masks) if mask), default=0)
    return pb.LookupAndLeaseRequest(
        requester_id=own_id,
        expected_incarnation=peer.incarnation,
        layout_digest=layout_digest(space.shards.layout, space.shards.chunk_size),
        chunk_size=space.shards.chunk_size,
        chunk_keys=keys,
        offers=offers,
        transfer_id=transfer_id,
        namespace_root=space.root,
        have_objects=[mask.to_bytes(width, "little") if mask else b"" for mask in masks[:last]],
        digest_function=namespace_pb2.DIGEST_FUNCTION_SHA256,
        protocol_version=max(PROTOCOL_VERSIONS),
    )


def check_answer(
    reply: pb.LookupAndLeaseResponse,
    place: Place,
    shards: ShardMap,
    masks: Sequence[int],
    transfer_id: int,
    paths: Sequence[str],
) -> Ticket:
    """Raises IncarnationStale, or TransferFailed for an answer that no honest server gives."""
    if reply.incarnation != place[1]:
        raise IncarnationStale(f"{place[0]} is another run now.", server_id=place[0])
    ticket = reply.ticket
    if not ticket.lease_id or not ticket.slots:
        return Ticket()
    path = convert.PATH_NAMES.get(ticket.path, "")
    _require(path in paths, "its data path was not offered")
    _require(MIN_PIECE <= ticket.piece_bytes <= MAX_PIECE, "its messages have a wrong size")
    objects: dict[tuple[int, int], Lent] = {}
    sizes = [slot.size_bytes for slot in ticket.slots]
    for slot in ticket.slots:
        _require(slot.chunk_index < len(masks), "it has a chunk that was not asked for")
        _require(slot.group_index < shards.num_groups, "it has a group that the layout lacks")
        _require(slot.kv_rank < shards.layout.world_size, "it has a rank that the layout lacks")
        _require(slot.size_bytes == shards.object_bytes[slot.group_index], "an object has a wrong size")
        _require(len(slot.checksum) == CHECKSUM_BYTES, "an object has no checksum")
        shard = shards.shard(slot.kv_rank, slot.group_index)
        name = (slot.chunk_index, shard)
        _require(name not in objects, "an object is there twice")
        _require(not masks[slot.chunk_index] >> shard & 1, "an object was not asked for")
        objects[name] = Lent(slot.size_bytes, slot.first_tag, slot.checksum)
    first = tags.first_tags(Kind.PEER, transfer_id, sizes, ticket.piece_bytes)
    _require(list(first) == [slot.first_tag for slot in ticket.slots], "its tags are others")
    return Ticket(ticket.lease_id, path, ticket.piece_bytes, reply.ucx_address, objects)


def _require(good: bool, problem: str) -> None:
    if not good:
        raise TransferFailed(f"Its ticket cannot be right: {problem}.", cause="ticket")
