from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import AlignmentInvalid, AlignmentTooLarge, InvalidArgument
from kvwire.keys import DEFAULT_MAX_CHUNK_SIZE, final_chunk_size, required_alignment

VECTORS = json.loads((Path(__file__).parents[3] / "proto/testdata/alignment.json").read_text())
SPANS = st.lists(st.integers(1, 4096), min_size=1, max_size=6)


@pytest.mark.parametrize("vector", VECTORS["required_alignment"], ids=str)
def test_required_alignment_vectors(vector):
    assert required_alignment(vector["spans"]) == vector["alignment"]


@pytest.mark.parametrize("spans", VECTORS["required_alignment_invalid"], ids=str)
def test_required_alignment_refuses(spans):
    with pytest.raises(AlignmentInvalid):
        required_alignment(spans)


@pytest.mark.parametrize("vector", VECTORS["final_chunk_size"], ids=str)
def test_final_chunk_size_vectors(vector):
    assert final_chunk_size(vector["minimum"], vector["alignment"]) == vector["final"]


@pytest.mark.parametrize("vector", VECTORS["alignment_too_large"], ids=str)
def test_too_large_vectors(vector):
    with pytest.raises(AlignmentTooLarge) as caught:
        final_chunk_size(vector["minimum"], vector["alignment"], VECTORS["maximum"])
    assert caught.value.metadata["maximum"] == str(VECTORS["maximum"]) == str(DEFAULT_MAX_CHUNK_SIZE)


@pytest.mark.parametrize("vector", VECTORS["alignment_invalid"], ids=str)
def test_invalid_alignment_vectors(vector):
    with pytest.raises(AlignmentInvalid) as caught:
        final_chunk_size(vector["minimum"], vector["alignment"])
    assert caught.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("minimum", [0, -1])
def test_a_minimum_below_one_token_is_refused(minimum):
    with pytest.raises(InvalidArgument, match="minimum"):
        final_chunk_size(minimum, 16)


@pytest.mark.parametrize(
    ("minimum", "alignment", "final"),
    [
        (256, 256, 256),
        (256, 272, 272),
        (300, 272, 544),
        (257, 256, 512),
        (1, 7, 7),
        (1024, 400, 1200),
        (255, 1, 255),
    ],
)
def test_bl01_any_block_span_gets_a_chunk_size(minimum, alignment, final):
    assert final_chunk_size(minimum, alignment) == final


def test_bl01_groups_48_and_80():
    assert final_chunk_size(256, required_alignment([48, 80])) == 480


@given(minimum=st.integers(1, 2**40), alignment=st.integers(1, 2**40))
def test_bl01_final_size_is_the_smallest_multiple_that_reaches_the_minimum(minimum, alignment):
    final = final_chunk_size(minimum, alignment, maximum=2**42)
    assert final % alignment == 0
    assert final >= minimum
    assert final - alignment < minimum


@given(SPANS, st.integers(1, 65_536))
def test_bl01_final_size_fits_every_group(spans, minimum):
    final = final_chunk_size(minimum, required_alignment(spans), maximum=2**80)
    assert all(final % span == 0 for span in spans)


@given(SPANS)
def test_the_alignment_is_the_least_common_multiple(spans):
    alignment = required_alignment(spans)
    primes = [p for p in range(2, 65) if alignment % p == 0]
    assert all(alignment % span == 0 for span in spans)
    assert not any(all((alignment // p) % span == 0 for span in spans) for p in primes)


@given(SPANS, st.data())
def test_the_order_of_groups_and_scratch_groups_do_not_matter(spans, data):
    mixed = data.draw(st.permutations([*spans, 0, 0]))
    assert required_alignment(iter(mixed)) == required_alignment(spans)


def test_bl02_a_scratch_group_is_left_out():
    alignment = required_alignment([96, 0, 96])
    assert (alignment, final_chunk_size(256, alignment)) == (96, 288)


def test_bl02_bad_input_is_refused_and_the_next_good_call_succeeds():
    with pytest.raises(AlignmentInvalid):
        final_chunk_size(256, 0)
    with pytest.raises(AlignmentInvalid):
        final_chunk_size(256, -96)
    with pytest.raises(AlignmentInvalid):
        required_alignment([96, -96])
    with pytest.raises(AlignmentInvalid):
        required_alignment([0, 0])
    with pytest.raises(AlignmentInvalid):
        required_alignment([])
    with pytest.raises(AlignmentTooLarge, match="--max-chunk-size"):
        final_chunk_size(256, required_alignment([65521, 65519, 65497]))
    assert final_chunk_size(256, 96) == 288
