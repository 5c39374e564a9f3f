from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.cli import units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64k", 65536),
        ("64 KiB", 65536),
        ("64KB", 64000),
        ("1GiB", 1 << 30),
        ("1G", 1 << 30),
        ("1.5GiB", 3 << 29),
        ("10b", 10),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(text, size):
    assert units.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "1e9", "1.00001KiB", "1,5GiB", "nan"])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match="is not"):
        units.parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("0.5", 0.5),
        ("30s", 30),
        ("500ms", 0.5),
        ("2min", 120),
        ("1h30m", 5400),
        ("1 h 5 s", 3605),
    ],
)
def test_durations(text, seconds):
    assert units.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-3", "5x", "1h30", "30 1", "inf", "1e3"])
def test_bad_durations(text):
    with pytest.raises(ValueError, match="is not"):
        units.parse_duration(text)


@given(st.integers(0, 1 << 60))
def test_exact_size_comes_back(size):
    assert units.parse_size(units.exact_size(size)) == size


@given(st.integers(0, 10**7))
def test_exact_duration_comes_back(milliseconds):
    seconds = milliseconds / 1000
    assert units.parse_duration(units.exact_duration(seconds)) == pytest.approx(seconds)


def test_texts_for_people():
    assert units.format_size(0) == "0 B"
    assert units.format_size(1023) == "1023 B"
    assert units.format_size(3 << 29) == "1.5 GiB"
    assert units.format_size(1 << 60) == "1048576 TiB"
    assert units.format_duration(0.000412) == "412 us"
    assert units.format_duration(0.0521) == "52.1 ms"
    assert units.format_duration(61.4) == "61.4 s"
    assert units.format_duration(3600 * 5 + 61) == "5 h 1 min"
    assert units.format_duration(150) == "2 min 30 s"
