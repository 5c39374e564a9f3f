from __future__ import annotations

import random
from hashlib import sha256

import pytest

from kvwire.blend.index import ENTRY_BYTES, BlendChunk, BlendHit, BlendIndex
from kvwire.blend.rolling import RollingHash
from kvwire.errors import TokensInvalid
from kvwire.keys import chunk_keys, pack_tokens

ROOT, OTHER = b"r" * 32, b"o" * 32


def chain(tokens: bytes, size: int, root: bytes = ROOT) -> list[BlendChunk]:
    keys = chunk_keys(root, tokens, size)
    parents = [b"", *keys]
    step = 4 * size
    return [
        BlendChunk(key, root, parents[number], tokens[number * step : (number + 1) * step])
        for number, key in enumerate(keys)
    ]


def some_tokens(count: int, seed: int) -> bytes:
    return pack_tokens(random.Random(seed).choices(range(100_000), k=count))


def test_windows_and_chunks_have_the_same_fingerprints():
    rolling = RollingHash(8)
    tokens = some_tokens(1000, 1)
    windows = rolling.of_windows(tokens).tolist()
    assert len(windows) == 993
    assert rolling.of_chunks(tokens) == windows[::8]
    assert rolling.of_windows(tokens[:28]).tolist() == []
    # The same content elsewhere, far behind the powers that were made first.
    assert rolling.of_windows(some_tokens(5000, 2) + tokens).tolist()[5000:] == windows


def test_fingerprints_of_patterns_do_not_collide():
    rolling = RollingHash(16)
    patterns = {pack_tokens([(number >> bit) & 1 for bit in range(16)]) for number in range(4096)}
    assert len({rolling.of_chunks(pattern)[0] for pattern in patterns}) == 4096


def test_finds_chunks_at_any_offset_with_both_positions():
    index = BlendIndex(8)
    chunks = chain(some_tokens(32, 1), 8)
    index.add(chunks)
    prompt = some_tokens(5, 9) + chunks[2].tokens + some_tokens(3, 8) + chunks[0].tokens + chunks[2].tokens
    assert index.match(ROOT, prompt) == [
        BlendHit(chunks[2].key, 16, 5),
        BlendHit(chunks[0].key, 0, 16),
        BlendHit(chunks[2].key, 16, 24),
    ]


def test_a_parent_may_come_after_its_child():
    index = BlendIndex(4)
    chunks = chain(some_tokens(16, 1), 4)
    index.add([chunks[3], chunks[2]])
    assert index.match(ROOT, chunks[3].tokens) == []
    index.add([chunks[1], chunks[0]])
    assert index.match(ROOT, chunks[3].tokens) == [BlendHit(chunks[3].key, 12, 0)]


def test_parents_in_a_circle_have_no_position():
    index = BlendIndex(4)
    tokens = some_tokens(8, 1)
    index.add([BlendChunk(b"a" * 32, ROOT, b"b" * 32, tokens[:16])])
    index.add([BlendChunk(b"b" * 32, ROOT, b"a" * 32, tokens[16:])])
    assert index.match(ROOT, tokens) == []


def test_bl44_namespaces_are_kept_apart():
    index = BlendIndex(4)
    tokens = some_tokens(4, 1)
    mine, theirs = chain(tokens, 4)[0], chain(tokens, 4, OTHER)[0]
    index.add([theirs])
    assert index.match(ROOT, tokens) == []
    index.add([mine])
    assert [hit.key for hit in index.match(ROOT, tokens)] == [mine.key]
    assert [hit.key for hit in index.match(OTHER, tokens)] == [theirs.key]
    index.remove(theirs.key)
    assert index.namespaces == 1


def test_bl44_a_collision_is_dropped_by_comparing_tokens(monkeypatch):
    def same_for_all(self: RollingHash, packed: bytes) -> list[int]:
        return [int(fingerprint) for fingerprint in self.of_windows(known)] * (len(packed) // 16)

    known = some_tokens(4, 1)
    monkeypatch.setattr(RollingHash, "of_chunks", same_for_all)
    index = BlendIndex(4)
    index.add([chain(some_tokens(4, 2), 4)[0]])
    assert index.match(ROOT, known) == []
    index.add(chain(known, 4))
    assert [hit.key for hit in index.match(ROOT, known)] == [chain(known, 4)[0].key]


def test_bl44_old_content_of_a_key_matches_no_more():
    index = BlendIndex(4)
    old, new = some_tokens(4, 1), some_tokens(4, 2)
    head = chain(some_tokens(4, 3), 4)[0]
    index.add([head, BlendChunk(b"k" * 32, ROOT, head.key, old)])
    index.add([BlendChunk(b"k" * 32, ROOT, head.key, new)])
    assert index.match(ROOT, old) == []
    assert index.match(ROOT, new) == [BlendHit(b"k" * 32, 4, 0)]
    assert len(index) == 2


def test_candidates_with_the_same_tokens_are_bounded_and_the_same_position_is_first():
    index = BlendIndex(4, max_candidates=3)
    tokens = some_tokens(4, 1)
    for seed in range(10):
        index.add(chain(some_tokens(4 * (seed % 5), 50 + seed) + tokens, 4))
    hits = index.match(ROOT, some_tokens(8, 99) + tokens)
    assert len(hits) == 3
    assert (hits[0].cached_position, hits[0].prompt_position) == (8, 8)
    assert len({hit.key for hit in hits}) == 3


def test_a_repeated_token_gives_no_overlapping_matches():
    index = BlendIndex(8)
    index.add(chain(pack_tokens([7] * 8), 8))
    assert [hit.prompt_position for hit in index.match(ROOT, pack_tokens([7] * 30))] == [0, 8, 16]


def test_memory_is_bounded_and_what_was_used_last_stays():
    index = BlendIndex(4, max_bytes=10 * (ENTRY_BYTES + 16))
    heads = [chain(some_tokens(4, seed), 4)[0] for seed in range(200)]
    index.add(heads[:10])
    index.match(ROOT, heads[0].tokens)
    index.add(heads[10:19])
    assert len(index) == 10
    assert heads[0].key in index
    for head in heads[19:]:
        index.add([head])
        assert index.match(ROOT, head.tokens) == [BlendHit(head.key, 0, 0)]
    assert len(index) == 10
    assert heads[0].key not in index
    for head in heads[-10:]:
        assert index.match(ROOT, head.tokens)


def test_removal_and_chunks_of_another_length():
    index = BlendIndex(4)
    head = chain(some_tokens(4, 1), 4)[0]
    index.add([head, BlendChunk(b"x" * 32, ROOT, b"", some_tokens(5, 1))])
    assert len(index) == 1
    assert index.remove(head.key)
    assert not index.remove(head.key)
    assert index.match(ROOT, head.tokens) == []
    index.add([head])
    index.clear()
    assert (len(index), index.namespaces) == (0, 0)


def test_tokens_must_be_whole():
    with pytest.raises(TokensInvalid):
        BlendIndex(4).match(ROOT, b"abc")


def test_a_first_chunk_is_known_by_its_key():
    tokens = some_tokens(4, 1)
    index = BlendIndex(4)
    index.add([BlendChunk(sha256(b"not from the root" + tokens).digest(), ROOT, b"", tokens)])
    assert index.match(ROOT, tokens) == []
