from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.transfer.checksum import Checksum, checksum


@pytest.mark.parametrize(
    ("data", "digest"),
    [
        (b"", "99aa06d3014798d86001c324468d497f"),
        (b"abc", "06b05ab6733a618578af5f94892f3950"),
    ],
)
def test_known_values(data, digest):
    assert checksum(data).hex() == digest


@given(st.binary(max_size=5000), st.lists(st.integers(0, 5000), max_size=4))
def test_parts_make_the_whole(data, cuts):
    parts = Checksum()
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, stop in itertools.pairwise(bounds):
        parts.update(memoryview(data)[start:stop])
    assert parts.digest() == checksum(data)


def test_arrays_and_views():
    data = np.arange(100, dtype=np.uint8)
    assert checksum(data) == checksum(data.tobytes()) == checksum(memoryview(data))
