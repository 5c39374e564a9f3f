"""The server itself among the writers of the engine's model: it brings objects, and anything may go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from support.domain import NAMESPACE, OBJECT_BYTES
from support.engine_model import GROUPS, MAX_CHUNKS, WORLD, EngineModel, Name, pattern

if TYPE_CHECKING:
    from kvwire.server.fetch.fills import Hold
    from kvwire.server.store import StoredObject

INDEX = st.integers(0, 1000)


@dataclass(eq=False)
class Brought:
    """An object on its way. `given_up`: its memory waits for whoever may still write to it."""

    stored: StoredObject
    name: Name
    fill: int
    hold: Hold | None
    given_up: bool = False

    @property
    def offset(self) -> int:
        return self.stored.offset


@dataclass(eq=False)
class Held:
    """What a hold keeps: the objects that were there when it took their chunk."""

    hold: Hold
    names: set[Name] = field(default_factory=set)


class FillModel(EngineModel):
    """Rules for fills, beside those for clients."""

    def begin_with(self, policy: str) -> None:
        super().begin_with(policy)
        self.brought: list[Brought] = []
        self.held: list[Held] = []

    @property
    def fills(self):
        return self.domain.engine.fills

    def filling(self, name: Name) -> bool:
        return any(each.name == name and not each.given_up for each in self.brought)

    @rule(
        seed=st.integers(0, 3), first=st.integers(0, MAX_CHUNKS), mask=st.integers(1, 15), hold=st.booleans()
    )
    def begin_a_fill(self, seed: int, first: int, mask: int, hold: bool) -> None:
        space = self.domain.engine.space_of(NAMESPACE)
        keys = self.keys(seed, MAX_CHUNKS)
        wanted = [(index, mask) for index in range(first % MAX_CHUNKS, MAX_CHUNKS)]
        if space is None:
            return
        survey = self.fills.survey(space, keys)
        for index, key in enumerate(keys):
            for shard in range(WORLD * GROUPS):
                name = (key, *divmod(shard, GROUPS))
                assert bool(survey.coming[index] >> shard & 1) == self.filling(name)
                assert not survey.resident[index] >> shard & 1 or name in self.committed
        evicted = self.domain.engine.store.evicted_chunks
        room = self.fills.room(space, keys)
        absent = sum(
            not (there | closed) >> shard & 1
            for index, each in wanted
            for there, closed in [(survey.resident[index] | survey.coming[index], survey.closed[index])]
            for shard in range(WORLD * GROUPS)
            if each >> shard & 1
        )
        fill = self.fills.begin(space, keys, wanted)
        if absent * OBJECT_BYTES > room:
            assert fill.full
            assert not fill.objects
            assert self.domain.engine.store.evicted_chunks == evicted
        kept = self.new_hold() if hold else None
        for stored, index in fill.objects.items():
            name = (keys[index], *divmod(stored.shard, GROUPS))
            self.brought.append(Brought(stored, name, fill.id, kept.hold if kept else None))

    def new_hold(self) -> Held:
        self.held.append(Held(self.fills.hold()))
        return self.held[-1]

    def pick(self, index: int, given_up: bool = False) -> Brought | None:
        chosen = [each for each in self.brought if each.given_up == given_up]
        return chosen[index % len(chosen)] if chosen else None

    @precondition(lambda self: self.brought)
    @rule(index=INDEX, count=st.integers(1, 4))
    def an_object_has_come(self, index: int, count: int) -> None:
        for _ in range(count):
            each = self.pick(index)
            if each is None:
                return
            data = pattern(each.name, each.fill)
            self.arena[each.offset : each.offset + OBJECT_BYTES] = data
            self.fills.commit(each.stored, b"c" * 16, b"", each.hold)
            self.committed[each.name] = data
            self.brought.remove(each)
            for held in self.held:
                if held.hold is each.hold:
                    held.names.add(each.name)

    @precondition(lambda self: self.brought)
    @rule(index=INDEX)
    def an_object_fails(self, index: int) -> None:
        if (each := self.pick(index)) is not None:
            self.fills.abort(each.stored)
            self.brought.remove(each)

    @precondition(lambda self: self.brought)
    @rule(index=INDEX)
    def an_object_is_given_up(self, index: int) -> None:
        """The source hangs, and may write on."""
        if (each := self.pick(index)) is not None:
            self.fills.quarantine(each.stored)
            each.given_up = True

    @precondition(lambda self: self.brought)
    @rule(index=INDEX, given_up=st.booleans())
    def a_source_scribbles(self, index: int, given_up: bool) -> None:
        if (each := self.pick(index, given_up)) is not None:
            self.arena[each.offset : each.offset + OBJECT_BYTES] = b"\xdd" * OBJECT_BYTES

    @precondition(lambda self: any(each.given_up for each in self.brought))
    @rule(index=INDEX)
    def a_source_lets_go(self, index: int) -> None:
        each = self.pick(index, given_up=True)
        assert each is not None
        self.fills.release(each.stored)
        self.brought.remove(each)

    @rule(seed=st.integers(0, 3), mask=st.integers(1, 15))
    def hold_what_is_there(self, seed: int, mask: int) -> None:
        space = self.domain.engine.space_of(NAMESPACE)
        if space is None:
            return
        keys = self.keys(seed, MAX_CHUNKS)
        held = self.new_hold()
        self.fills.keep_resident(held.hold, space, keys, [mask] * MAX_CHUNKS)
        for key in keys:
            chunk = self.domain.engine.store.get(key, space)
            if chunk is not None and chunk.mask & mask:
                shards = [s for s in range(WORLD * GROUPS) if chunk.mask >> s & 1]
                held.names |= {(key, *divmod(shard, GROUPS)) for shard in shards}

    @precondition(lambda self: self.held)
    @rule(index=INDEX)
    def a_hold_ends(self, index: int) -> None:
        held = self.held.pop(index % len(self.held))
        self.fills.let_go(held.hold)
        self.fills.let_go(held.hold)

    def what_is_held_stays(self) -> None:
        for held in self.held:
            for key, rank, group in held.names:
                chunk = self.domain.engine.store.get(key)
                assert chunk is not None
                assert chunk.mask >> (rank * GROUPS + group) & 1

    def writing_offsets(self) -> list[int]:
        return [*super().writing_offsets(), *(each.offset for each in self.brought)]

    def waiting_objects(self) -> int:
        return super().waiting_objects() + sum(each.given_up for each in self.brought)

    def being_written(self, name: Name) -> bool:
        return super().being_written(name) or self.filling(name)

    def drain(self) -> None:
        """The prefetcher ends before the engine does."""
        for each in self.brought:
            (self.fills.release if each.given_up else self.fills.abort)(each.stored)
        for held in self.held:
            self.fills.let_go(held.hold)
        self.brought, self.held = [], []
        assert not len(self.fills)
        super().drain()
