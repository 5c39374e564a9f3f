"""What a client has learned of its server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.client import calls, split
from kvwire.client.types import Limits, LookupResult, Negotiated
from kvwire.keys import chunk_keys, pack_tokens, root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvwire.keys import ExtraInput, Namespace, Tokens


class ClientState:
    """Limits and chunk size from the negotiation, and the incarnation that every reply carries."""

    def __init__(self) -> None:
        self.chunk_size = 0
        self.limits = Limits()
        self.num_groups = 0
        self.incarnation = b""
        self.on_new_incarnation: list[Callable[[], None]] = []

    def negotiated_with(self, negotiated: Negotiated) -> Negotiated:
        self.chunk_size = negotiated.chunk_size
        self.limits = negotiated.limits
        return negotiated

    def see(self, incarnation: bytes) -> None:
        if incarnation == self.incarnation or not incarnation:
            return
        before, self.incarnation = self.incarnation, incarnation
        if before:
            for tell in tuple(self.on_new_incarnation):
                tell()

    def lookup(
        self,
        namespace: Namespace,
        tokens: Tokens | None,
        keys: Iterable[bytes] | None,
        *,
        registration_id: int,
        session_id: str,
        extra_inputs: Iterable[ExtraInput],
    ) -> calls.Call[LookupResult]:
        """The call; a prompt whose tokens do not fit one message is named by its keys instead."""
        extras = tuple(extra_inputs)
        if tokens is not None and keys is None:
            tokens = pack_tokens(tokens)
            if len(tokens) > split.message_room(self.limits) and self.chunk_size:
                keys = chunk_keys(root(namespace, self.chunk_size), tokens, self.chunk_size, extras)
                tokens, extras = None, ()
        return calls.lookup(
            namespace,
            tokens=tokens,
            keys=keys,
            registration_id=registration_id,
            session_id=session_id,
            extra_inputs=extras,
        )
