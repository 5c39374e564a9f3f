"""What the scheduler's side remembers of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from kvwire.keys import ChunkHasher, root
from kvwire.vllm.params import RequestParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvwire.keys import ExtraInput, Namespace


class Stage(Enum):
    """Where a request stands between its lookup and its first token."""

    NEW = auto()
    ASKED = auto()
    LOADING = auto()
    ADMITTED = auto()


@dataclass(slots=True)
class Account:
    """What a request was given. `local`, `loaded`: tokens at its first admission, from the engine's own cache
    and from the server. `stored`: tokens handed to stores. `reason`: why nothing was loaded."""

    local: int = 0
    loaded: int = 0
    stored: int = 0
    hit: int = 0
    reason: str = ""
    admitted: bool = False


@dataclass(slots=True)
class RequestTracker:
    """One request. Token counts start at the beginning of its prompt.

    `asked`: how many tokens the lookup named. `local`, `promised`: from the last answer to the engine.
    `released_chunks` of the lookup's lease are given back already. `next_chunk` is the first chunk that the
    server may lack. `open_stores` counts stores times ranks. `offers` are the blocks of recurrent states that
    the engine has named, by group and number of tokens. `outdated`: its KV is older than a reset of the cache
    and must not be stored any more.
    """

    request: Any
    session_id: str
    namespace: Namespace
    extras: tuple[ExtraInput, ...]
    cacheable: bool
    params: RequestParams = field(default_factory=RequestParams)
    trace: Mapping[str, str] = field(default_factory=dict)
    stage: Stage = Stage.NEW
    preemptions: int = 0
    asked: int = 0
    local: int = 0
    promised: int = 0
    hit: int = 0
    released_chunks: int = 0
    may_load: bool = True
    next_chunk: int = 0
    open_stores: int = 0
    offers: dict[tuple[int, int], int] = field(default_factory=dict)
    loading_blocks: frozenset[int] = frozenset()
    outdated: bool = False
    account: Account = field(default_factory=Account)
    _hasher: ChunkHasher | None = field(default=None, repr=False)

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    @property
    def may_store(self) -> bool:
        return self.cacheable and self.params.store and not self.outdated

    def start_over(self) -> None:
        """Forget the answer of the lookup, as if the request had just come."""
        self.stage = Stage.NEW
        self.preemptions = self.request.num_preemptions
        self.asked = self.local = self.promised = self.hit = 0
        self.released_chunks = self.next_chunk = 0
        self.loading_blocks = frozenset()
        self.offers = {}
        self.outdated = False

    def storable_tokens(self, num_new: int) -> int:
        """How many tokens have their KV in place after a step of `num_new`, if they are to be stored."""
        request = self.request
        prompt = min(int(request.num_prompt_tokens), int(request.num_computed_tokens) + num_new)
        if not self.params.save_decode:
            return prompt
        # Tokens of steps in flight may be taken back, and their ids may not be known yet.
        settled = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        return max(prompt, min(int(settled), int(request.num_tokens)))

    def offered(self, states: Iterable[tuple[int, int, int]], chunk_size: int) -> None:
        """Recurrent states that a step leaves behind: the engine's group, the block, the number of tokens."""
        for group, block, num_tokens in states:
            if num_tokens % chunk_size == 0:
                self.offers[group, num_tokens] = block

    def extras_before(self, num_tokens: int) -> tuple[ExtraInput, ...]:
        """The inputs that begin among the first tokens."""
        return tuple(extra for extra in self.extras if extra.start < num_tokens)

    def keys(self, chunks: range, chunk_size: int) -> tuple[bytes, ...]:
        """The keys of these chunks, made here: for chunks that no lookup has named."""
        if self._hasher is None:
            self._hasher = ChunkHasher(root(self.namespace, chunk_size), chunk_size)
            self._hasher.append([], self.extras)
        done = len(self._hasher.keys) * chunk_size
        if done < chunks.stop * chunk_size:
            self._hasher.append(self.request.all_token_ids[done : chunks.stop * chunk_size])
        return tuple(self._hasher.keys[chunks.start : chunks.stop])
