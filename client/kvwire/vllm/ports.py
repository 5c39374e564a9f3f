"""What the scheduler's side needs of the outside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.keys import ExtraInput
    from kvwire.vllm.tracker import RequestTracker


class Lookups(Protocol):
    """What this side needs of `SchedulerAdapter`. All return at once, but for the two that wait."""

    @property
    def is_healthy(self) -> bool: ...
    @property
    def chunk_size(self) -> int | None: ...
    def maybe_submit_lookup_request(
        self,
        request_id: str,
        *,
        tokens: Sequence[int],
        adapter: str,
        adapter_revision: str,
        salt: str,
        extra_inputs: Sequence[ExtraInput],
    ) -> None: ...
    def check_lookup_result(self, request_id: str) -> int | None: ...
    def is_lookup_stale(self, request_id: str) -> bool: ...
    def cleanup_lookup_result(self, request_id: str) -> None: ...
    def release_lookup(self, request_id: str, first_chunk: int = 0, chunk_count: int = 0) -> None: ...
    def end_session(self, request_id: str) -> None: ...
    def wait_for_lookups(self, timeout: float) -> bool: ...
    def clear(self, timeout: float) -> int | None: ...


class Naming(Protocol):
    """Is told of chunks of a request that are at the servers, or on their way there."""

    def named(self, tracker: RequestTracker, chunks: range, chunk_size: int) -> None: ...
