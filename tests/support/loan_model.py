"""Another server among the readers of the engine's model: what is lent to it stays until it is sent."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvwire.server.layout import layout_digest
from kvwire.server.lending import LoanRequest
from support.domain import CHUNK, NAMESPACE, OBJECT_BYTES
from support.engine_model import GROUPS, MAX_CHUNKS, Slot
from support.fill_model import FillModel

INDEX = st.integers(0, 1000)


@dataclass(eq=False)
class Lent:
    name: str
    lease_id: int
    slots: list[Slot]
    expected: list[bytes]
    deadline: float
    ended: bool = False
    confirmed: bool = False


class LoanModel(FillModel):
    """Rules for peers, beside those for clients and sources."""

    def begin_with(self, policy: str) -> None:
        super().begin_with(policy)
        self.lent: list[Lent] = []

    def is_live(self, lent: Lent) -> bool:
        return not lent.ended and self.domain.now < lent.deadline

    @rule(
        seed=st.integers(0, 3),
        chunks=st.integers(1, MAX_CHUNKS),
        have=st.lists(st.integers(0, 15), max_size=MAX_CHUNKS),
        most=st.integers(0, 20),
        name=st.sampled_from("pq"),
    )
    def a_peer_asks(self, seed: int, chunks: int, have: list[int], most: int, name: str) -> None:
        self.lend(seed, chunks, have, most, name)

    def lend(self, seed: int, chunks: int, have: list[int], most: int, name: str) -> None:
        space = self.domain.engine.space_of(NAMESPACE)
        if space is None:
            return
        keys = self.keys(seed, chunks)
        masks = [*have, *[0] * chunks][:chunks]
        digest = layout_digest(self.domain.layout, CHUNK)
        request = LoanRequest(space.root, digest, keys, masks, most)
        lending = self.domain.engine.lending
        expected, helps = lending.look(request, self.domain.now)
        loan = lending.lend(lending.borrower(name, "ucx-local"), request, self.domain.now)
        assert (loan.hit_chunks, bool(loan.lease_id)) == (expected, helps)
        assert len(loan.slots) <= most
        slots = [Slot((keys[s.chunk_index], s.rank, s.group_index), s.ref.offset) for s in loan.slots]
        assert not [s for s in loan.slots if masks[s.chunk_index] >> (s.rank * GROUPS + s.group_index) & 1]
        assert len({slot.name for slot in slots}) == len(slots)
        if loan.lease_id:
            known = [self.committed[slot.name] for slot in slots]
            self.lent.append(Lent(name, loan.lease_id, slots, known, self.domain.now + loan.ttl))

    @precondition(lambda self: self.lent)
    @rule(index=INDEX, name=st.sampled_from("pq"))
    def a_peer_is_done(self, index: int, name: str) -> None:
        lent = self.lent[index % len(self.lent)]
        held = self.domain.engine.lending.end(name, lent.lease_id, self.domain.now)
        assert held == (self.is_live(lent) and name == lent.name)
        lent.ended = lent.ended or held

    @precondition(lambda self: self.lent)
    @rule(index=INDEX)
    def a_peer_is_lost(self, index: int) -> None:
        lent = self.lent[index % len(self.lent)]
        engine = self.domain.engine
        if self.is_live(lent):
            borrower = engine._state.leases._live[lent.lease_id].owner
            engine.lending.forget(borrower)
            lent.ended = True

    def sent(self, lease_id: int) -> None:
        """The data path has confirmed that."""
        for lent in self.lent:
            if lent.lease_id == lease_id:
                assert not self.is_live(lent)
                lent.confirmed = True
        self.lent = [lent for lent in self.lent if not lent.confirmed]

    def what_was_lent_stays(self) -> None:
        offsets = {slot.offset for lent in self.lent for slot in lent.slots}
        assert not offsets & set(self.writing_offsets())
        for lent in self.lent:
            for slot, expected in zip(lent.slots, lent.expected, strict=True):
                assert self.arena[slot.offset : slot.offset + OBJECT_BYTES] == expected
