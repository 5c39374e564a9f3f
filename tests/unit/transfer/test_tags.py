from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import InvalidArgument
from kvwire.transfer import tags
from kvwire.transfer.tags import Kind, Tag


def test_layout_bit_by_bit():
    assert tags.encode(Kind.STORE, 1, 0) == 0x01_00000001_000000
    assert tags.encode(Kind.RETRIEVE, 0xABCDEF01, 0x123456) == 0x02_ABCDEF01_123456
    assert tags.encode(Kind.PEER, tags.MAX_LEASE, tags.MAX_PIECE) == 0x04_FFFFFFFF_FFFFFF
    assert tags.LEASE_MASK == 0xFF_FFFFFFFF_000000


@given(st.sampled_from(Kind), st.integers(1, tags.MAX_LEASE), st.integers(0, tags.MAX_PIECE))
def test_decode_undoes_encode(kind, lease, piece):
    tag = tags.encode(kind, lease, piece)
    assert tags.decode(tag) == Tag(kind, lease, piece)
    assert tags.lease_prefix(tag) == tags.encode(kind, lease)


@pytest.mark.parametrize(("lease", "piece"), [(0, 0), (1 << 32, 0), (1, -1), (1, 1 << 24)])
def test_numbers_that_do_not_fit(lease, piece):
    with pytest.raises(InvalidArgument):
        tags.encode(Kind.STORE, lease, piece)


@pytest.mark.parametrize(
    "tag", [0, -1, 1 << 64, 0x00_00000001_000000, 0x06_00000001_000000, 0x01_00000000_000001]
)
def test_tags_that_are_none(tag):
    with pytest.raises(InvalidArgument):
        tags.decode(tag)


def test_first_tags_number_the_pieces_of_a_lease_through():
    found = tags.first_tags(Kind.STORE, 9, [10, 11, 1], 5)
    assert [tags.decode(tag).piece for tag in found] == [0, 2, 5]


def test_lease_with_more_pieces_than_tags():
    with pytest.raises(InvalidArgument):
        tags.first_tags(Kind.STORE, 9, [1 << 25], 1)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize(("lanes", "used"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 32)])
def test_messages_are_spread_over_the_workers_of_a_side(kind, lanes, used):
    used = lanes if kind is Kind.PEER else used
    found = [tags.lane(tags.encode(kind, 5, piece), lanes) for piece in range(200)]
    assert found == [piece % used for piece in range(200)]
