"""Chunks in pages, while others come and go."""

from __future__ import annotations

from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.server.layout import ShardMap
from kvwire.server.store import Chunk, Space, listing
from kvwire.server.store.listing import Listing
from support.domain import CHUNK, layout

SPACE = Space(b"root", b"base", "model", "", ShardMap(layout(), CHUNK))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(0, 40),
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(0, 4), st.sets(st.integers(0, 60), max_size=5)), max_size=12),
)
def test_what_stays_is_met_once_in_the_order_of_its_coming(shift, count, size, between) -> None:
    """`between` two pages so many come, and those at these positions go."""
    pages = Listing()
    usual, listing._SHIFT = listing._SHIFT, shift
    try:
        chunks = [Chunk(index.to_bytes(2, "big"), b"", SPACE, [None]) for index in range(count)]
        for chunk in chunks:
            pages.add(chunk)
        staying, here = set(chunks), list(chunks)
        found: list[Chunk] = []
        after = 0
        while page := list(islice(pages.after(after), size)):
            found += page
            after = page[-1].serial
            coming, going = between.pop() if between else (0, set())
            for chunk in [here[position] for position in going if position < len(here)]:
                pages.remove(chunk)
                here.remove(chunk)
                staying.discard(chunk)
            for _ in range(coming):
                here.append(Chunk(b"new", b"", SPACE, [None]))
                pages.add(here[-1])
        assert [chunk for chunk in found if chunk in staying] == [each for each in chunks if each in staying]
        assert len(found) == len(set(found))
        assert [chunk.serial for chunk in found] == sorted(chunk.serial for chunk in found)
        assert list(pages.after(0)) == here
    finally:
        listing._SHIFT = usual
