from __future__ import annotations

import os
import subprocess
import sys
import time
from array import array
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import InvalidArgument, TokensInvalid
from kvwire.keys import (
    ChunkHasher,
    ExtraInput,
    Namespace,
    chunk_keys,
    keys_from_block_hashes,
    pack_tokens,
    root,
    striding_block_hashes,
)

ROOT = root(Namespace("m"), 256)
TOKEN = st.integers(0, 2**32 - 1)
PROMPT = st.lists(TOKEN, max_size=60)
EXTRAS = st.lists(
    st.builds(ExtraInput, st.binary(min_size=1, max_size=3), st.integers(0, 70), st.integers(1, 70)),
    max_size=5,
)


def common_chunks(left, right):
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


class TestPacking:
    @given(PROMPT)
    def test_every_form_of_the_same_tokens_packs_alike(self, ids):
        expected = b"".join(token.to_bytes(4, "little") for token in ids)
        assert pack_tokens(ids) == expected
        assert pack_tokens(tuple(ids)) == expected
        assert pack_tokens(iter(ids)) == expected
        assert pack_tokens(array("I", ids)) == expected
        assert pack_tokens(array("Q", ids)) == expected
        for dtype in ("<u4", ">u4", "<i8", ">u8"):
            assert pack_tokens(np.array(ids, dtype=dtype)) == expected
        assert pack_tokens([np.uint32(token) for token in ids]) == expected
        for packed in (
            expected,
            bytearray(expected),
            memoryview(expected),
            np.frombuffer(expected, np.uint8),
        ):
            assert pack_tokens(packed) == expected

    def test_views_with_gaps_pack_what_they_show(self):
        wide = np.arange(10, dtype=np.uint32)
        assert pack_tokens(wide[::3]) == pack_tokens([0, 3, 6, 9])
        doubled = bytes(byte for byte in pack_tokens([7, 8]) for _ in range(2))
        assert pack_tokens(memoryview(doubled)[::2]) == pack_tokens([7, 8])
        assert chunk_keys(ROOT, memoryview(doubled)[::2], 1) == chunk_keys(ROOT, [7, 8], 1)

    @pytest.mark.parametrize(
        ("tokens", "position"),
        [
            ([-1], 0),
            ([0, 2**32], 1),
            ([0, 1, 10**6000], 2),
            ([1, 2, True], 2),
            ([False], 0),
            ([0.0], 0),
            ([1, None], 1),
            ([1, "2"], 1),
            ("12", 0),
            ([1, b"2"], 1),
            ([[1, 2]], 0),
            (np.array([1, -1]), 1),
            (np.array([1.0]), 0),
            (np.array([False, True]), 0),
            ([1, np.True_], 1),
            (np.array([[1, 2]], dtype=np.uint32), 0),
            (array("q", [1, 2**40]), 1),
            (array("f", [1]), 0),
        ],
    )
    def test_a_bad_token_is_named_by_its_position(self, tokens, position):
        with pytest.raises(TokensInvalid, match=f"position {position} ") as caught:
            pack_tokens(tokens)
        assert caught.value.metadata == {"position": str(position)}

    @pytest.mark.parametrize("length", [1, 2, 3, 5, 1023])
    def test_packed_tokens_come_in_fours(self, length):
        with pytest.raises(TokensInvalid, match=f"{length} bytes"):
            pack_tokens(bytes(length))

    def test_a_scalar_is_no_prompt(self):
        with pytest.raises(TokensInvalid, match="flat"):
            pack_tokens(np.array(7))


class TestChunkKeys:
    @given(PROMPT, st.integers(1, 9))
    def test_each_key_hashes_the_key_before_and_its_own_tokens(self, ids, chunk_size):
        keys = chunk_keys(ROOT, ids, chunk_size)
        key = ROOT
        for position in range(len(ids) // chunk_size):
            chunk = ids[position * chunk_size : (position + 1) * chunk_size]
            key = sha256(key + b"".join(token.to_bytes(4, "little") for token in chunk)).digest()
            assert keys[position] == key
        assert len(keys) == len(ids) // chunk_size

    @given(PROMPT, PROMPT, st.integers(1, 9))
    def test_two_prompts_share_exactly_the_whole_chunks_of_their_common_start(self, left, right, chunk_size):
        both = chunk_keys(ROOT, left, chunk_size), chunk_keys(ROOT, right, chunk_size)
        whole = [[ids[i : i + chunk_size] for i in range(0, len(ids), chunk_size)] for ids in (left, right)]
        assert common_chunks(*both) == min(common_chunks(*whole), len(both[0]), len(both[1]))

    @given(PROMPT, EXTRAS, st.integers(1, 9), st.integers(0, 60))
    def test_a_chain_can_be_continued_anywhere(self, ids, extras, chunk_size, cut):
        keys = chunk_keys(ROOT, ids, chunk_size, extras)
        cut = min(cut, len(keys))
        rest = chunk_keys(
            ROOT,
            ids[cut * chunk_size :],
            chunk_size,
            extras,
            start_key=keys[cut - 1] if cut else None,
            first_chunk=cut,
        )
        assert keys[:cut] + rest == keys

    @given(PROMPT, EXTRAS, st.integers(1, 9), st.randoms(use_true_random=False))
    def test_the_order_of_inputs_does_not_matter(self, ids, extras, chunk_size, random):
        shuffled = random.sample(extras, len(extras))
        assert chunk_keys(ROOT, ids, chunk_size, shuffled) == chunk_keys(ROOT, ids, chunk_size, extras)

    @given(PROMPT, EXTRAS, st.integers(1, 9))
    def test_a_key_takes_in_exactly_the_inputs_that_its_chunk_overlaps(self, ids, extras, chunk_size):
        key = ROOT
        for chunk, actual in enumerate(chunk_keys(ROOT, ids, chunk_size, extras)):
            span = range(chunk * chunk_size, (chunk + 1) * chunk_size)
            inside = [e for e in extras if any(e.start <= position < e.start + e.length for position in span)]
            inside.sort(key=lambda e: (e.start, e.digest, e.length))
            extra = b"".join(e.encode(span.start) for e in inside)
            key = sha256(key + pack_tokens(ids[span.start : span.stop]) + extra).digest()
            assert actual == key

    @given(PROMPT, EXTRAS, st.integers(1, 9))
    def test_an_input_changes_keys_from_its_first_chunk_on_and_no_key_before(self, ids, extras, chunk_size):
        plain, extended = chunk_keys(ROOT, ids, chunk_size), chunk_keys(ROOT, ids, chunk_size, extras)
        first = min((extra.start // chunk_size for extra in extras), default=len(plain))
        assert common_chunks(plain, extended) == min(first, len(plain))

    @pytest.mark.parametrize(
        ("arguments", "keywords", "field"),
        [
            ((b"short", [1], 1), {}, "root"),
            ((ROOT, [1], 0), {}, "chunk_size"),
            ((ROOT, [1], -1), {}, "chunk_size"),
            ((ROOT, [1], 1), {"first_chunk": 1}, "first_chunk"),
            ((ROOT, [1], 1), {"start_key": ROOT}, "first_chunk"),
            ((ROOT, [1], 1), {"start_key": ROOT, "first_chunk": -1}, "first_chunk"),
            ((ROOT, [1], 1), {"start_key": b"short", "first_chunk": 1}, "start_key"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments, keywords, field):
        with pytest.raises(InvalidArgument) as caught:
            chunk_keys(*arguments, **keywords)
        assert caught.value.metadata["field"] == field

    @pytest.mark.parametrize(
        ("digest", "start", "length", "field"),
        [
            (b"", 0, 1, "digest"),
            (b"x" * 513, 0, 1, "digest"),
            (b"x", -1, 1, "start"),
            (b"x", 0, 0, "length"),
            (b"x", 0, -1, "length"),
            (b"x", 1, 2**63 - 1, "length"),
            (b"x", 2**63, 1, "length"),
        ],
    )
    def test_a_bad_input_is_refused(self, digest, start, length, field):
        with pytest.raises(InvalidArgument) as caught:
            ExtraInput(digest, start, length)
        assert caught.value.metadata["field"] == field

    def test_an_endless_input_costs_what_the_prompt_has(self):
        endless = ExtraInput(b"x", 0, 2**63 - 1)
        assert len(chunk_keys(ROOT, range(8), 4, [endless])) == 2
        last = chunk_keys(ROOT, range(4), 4, [endless], start_key=ROOT, first_chunk=2**60)
        assert last != chunk_keys(ROOT, range(4), 4, start_key=ROOT, first_chunk=2**60)


def test_keying_a_long_prompt_costs_little_more_than_its_hashing():
    packed = bytes(131_072 * 4)

    def bare():
        key = ROOT
        for offset in range(0, len(packed), 1024):
            key = sha256(key + packed[offset : offset + 1024]).digest()

    def seconds(work):
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    rounds = [(seconds(lambda: chunk_keys(ROOT, packed, 256)), seconds(bare)) for _ in range(15)]
    assert min(keyed for keyed, _ in rounds) < 1.5 * min(hashed for _, hashed in rounds)


class TestChunkHasher:
    @given(st.lists(st.tuples(PROMPT, EXTRAS), max_size=5), st.integers(1, 9))
    def test_appending_gives_the_keys_of_the_whole(self, steps, chunk_size):
        hasher = ChunkHasher(ROOT, chunk_size)
        ids, inputs, keys = [], [], []
        for tokens, extras in steps:
            keyed = len(keys) * chunk_size
            fresh = [extra for extra in extras if extra.start >= keyed]
            keys += hasher.append(tokens, fresh)
            ids += tokens
            inputs += fresh
            assert list(hasher.keys) == keys
            assert hasher.num_tokens == len(ids)
        assert keys == chunk_keys(ROOT, ids, chunk_size, inputs)

    def test_a_refused_append_changes_nothing(self):
        hasher = ChunkHasher(ROOT, 4)
        hasher.append(range(6))
        with pytest.raises(TokensInvalid):
            hasher.append([6, -1], [ExtraInput(b"x", 6, 1)])
        with pytest.raises(InvalidArgument, match="extras"):
            hasher.append([6, 7], [ExtraInput(b"x", 3, 9)])
        assert hasher.num_tokens == 6
        assert hasher.append([6, 7]) == chunk_keys(ROOT, range(8), 4)[1:]

    def test_bad_arguments_are_refused_at_once(self):
        with pytest.raises(InvalidArgument, match="root"):
            ChunkHasher(b"short", 4)
        with pytest.raises(InvalidArgument, match="chunk_size"):
            ChunkHasher(ROOT, 0)


class TestBlockHashes:
    @given(st.lists(st.binary(min_size=1, max_size=40), max_size=20), st.integers(1, 7))
    def test_striding_takes_the_last_hash_of_whole_chunks(self, hashes, blocks_in_chunk):
        strided = list(striding_block_hashes(hashes, blocks_in_chunk))
        whole = len(hashes) // blocks_in_chunk
        assert strided == [hashes[(chunk + 1) * blocks_in_chunk - 1] for chunk in range(whole)]

    def test_a_chunk_has_at_least_one_block(self):
        with pytest.raises(InvalidArgument, match="blocks_in_chunk"):
            striding_block_hashes([b"x"], 0)

    @given(st.lists(st.binary(min_size=1, max_size=40), unique=True, max_size=20))
    def test_keys_differ_by_hash_by_namespace_and_from_token_keys(self, hashes):
        keys = keys_from_block_hashes(ROOT, hashes)
        others = keys_from_block_hashes(root(Namespace("m"), 512), hashes)
        assert len(set(keys) | set(others)) == 2 * len(hashes)
        assert {len(key) for key in keys} <= {32}

    def test_empty_hashes_and_short_roots_are_refused(self):
        with pytest.raises(InvalidArgument, match="position 1"):
            keys_from_block_hashes(ROOT, [b"x", b""])
        with pytest.raises(InvalidArgument, match="root"):
            keys_from_block_hashes(b"", [b"x"])


PRINT_KEYS = """
from kvwire.keys import Namespace, chunk_keys, root
for namespace in (Namespace("m"), Namespace("m", adapter="", adapter_revision="", salt="")):
    print(b"".join(chunk_keys(root(namespace, 256), range(600), 256, ())).hex())
"""
GOLDEN = (
    "b4dca7b1c72b752f4baf6c86400966bcc3de2e28ab48965e84773618889e317c"
    "72ee16d9456c9ad25cb65d12ab69f6ebb114aff022696dae8c35cd158373e32d"
)


@pytest.mark.parametrize("seed", [None, "1", "2", "random"])
def test_bl05_every_process_computes_the_same_keys(seed):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    command = [sys.executable, "-c", PRINT_KEYS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [GOLDEN, GOLDEN]


MEDIA_1 = bytes.fromhex("01" * 30 + "0001")
MEDIA_2 = bytes.fromhex("02" * 30 + "0001")
PLACEHOLDERS = [99 if 260 <= position <= 400 else position for position in range(600)]


def with_media(digest, start=260, length=141):
    return chunk_keys(ROOT, PLACEHOLDERS, 256, [ExtraInput(digest, start, length)])


def test_bl07_another_image_hits_only_the_chunk_before_it():
    assert common_chunks(with_media(MEDIA_1), with_media(MEDIA_2)) * 256 == 256
    assert with_media(MEDIA_1) == with_media(MEDIA_1)


def test_bl07_an_image_one_position_later_is_another_prompt():
    assert common_chunks(with_media(MEDIA_1), with_media(MEDIA_1, 261, 140)) == 1
    assert common_chunks(with_media(MEDIA_1), with_media(MEDIA_1, 261, 141)) == 1


def test_bl07_an_image_is_not_its_placeholder_text():
    assert common_chunks(with_media(MEDIA_1), chunk_keys(ROOT, PLACEHOLDERS, 256)) == 1


def test_bl07_all_ways_to_key_a_prompt_agree():
    image = ExtraInput(MEDIA_1, 260, 141)
    whole = with_media(MEDIA_1)
    hasher = ChunkHasher(ROOT, 256)
    hasher.append(PLACEHOLDERS[:300], [image])
    hasher.append(PLACEHOLDERS[300:])
    continued = chunk_keys(ROOT, PLACEHOLDERS[256:], 256, [image], start_key=whole[0], first_chunk=1)
    assert list(hasher.keys) == whole == [whole[0], *continued]


def test_bl08_four_identities_have_four_chains_without_cross_hits():
    namespaces = [
        Namespace("m"),
        Namespace("m", adapter="red"),
        Namespace("m", salt="red"),
        Namespace("m", adapter="red", adapter_revision="2"),
    ]
    keys = [key for namespace in namespaces for key in chunk_keys(root(namespace, 256), range(600), 256)]
    assert len(set(keys)) == 8


def test_bl55_other_tenants_never_hit_and_the_same_tenant_does():
    def stored(salt):
        return chunk_keys(root(Namespace("m", salt=salt), 256), range(600), 256)

    assert common_chunks(stored("t1"), stored("t2")) == 0
    assert common_chunks(stored("t1"), stored("")) == 0
    assert common_chunks(stored("t1"), stored("t1")) == 2
