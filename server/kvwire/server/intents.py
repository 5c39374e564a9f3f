"""What operators want of the whole fleet, as one coordinator says."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvwire.v1 import coordinator_service_pb2 as pb

if TYPE_CHECKING:
    from kvwire.server.pinning import Pinning
    from kvwire.server.quotas import Quotas

log = logging.getLogger("kvwire.server")

TIMEOUT_S: Final = 5.0
KEY_BYTES: Final = 32
MAX_PINS: Final = 65_536
MAX_QUOTAS: Final = 16_384


class FleetIntents:
    """Of one coordinator. While it is away, and whatever it answers that is no answer, its pins
    and quotas stay.
    """

    def __init__(self, coordinator: str, pinning: Pinning, quotas: Quotas) -> None:
        self._coordinator = coordinator
        self._pinning = pinning
        self._quotas = quotas
        self._known: tuple[int, bytes] = (0, b"")

    @property
    def revision(self) -> int:
        return self._known[0]

    async def follow(self, stub: Any, revision: int, coordinator_incarnation: bytes = b"") -> bool:
        """After each register or heartbeat reply, with what it said. Best effort: False is tried again.

        Revisions of two runs are compared, too: the state folder may be another one.
        """
        wanted = (revision, coordinator_incarnation)
        if wanted == self._known or not (revision or self._known[0]):
            return True
        try:
            reply = await stub.GetIntents(pb.GetIntentsRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            log.warning("pins and quotas of %s could not be fetched: %s", self._coordinator, _cause(error))
            return False
        keys = [key for key in reply.pinned_keys if len(key) == KEY_BYTES][:MAX_PINS]
        self._pinning.set_fleet(self._coordinator, keys)
        quotas = reply.quotas[:MAX_QUOTAS]
        limits = {(each.tenant, int(each.tier)): each.limit_bytes for each in quotas}
        self._quotas.set_fleet(self._coordinator, limits)
        self._known = (reply.revision, coordinator_incarnation)
        told = (self._coordinator, reply.revision, len(keys), len(limits))
        log.info("%s: revision %d, %d chunks pinned, %d quotas", *told)
        return True


def _cause(error: grpc.RpcError) -> str:
    code = getattr(error, "code", None)
    return str(code().name) if callable(code) else type(error).__name__
