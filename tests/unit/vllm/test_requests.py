from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from kvwire.client.fingerprint import digest_of
from kvwire.keys import chunk_keys, root
from kvwire.vllm.identity import session_id, weights_digest
from kvwire.vllm.requests import TrackerFactory
from support.fake_engine import NAMESPACE, Request

TOKENS = [*range(260), *[9] * 141, *range(401, 600)]


@pytest.fixture
def track():
    return TrackerFactory(NAMESPACE)


def image(identifier, offset=260, length=141):
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=position)


def keys(track, chunk_size=256, **fields):
    """The keys of a prompt as the server makes them of what the connector tells it."""
    tracker = track(Request("r", TOKENS, **fields))
    tokens = tracker.request.all_token_ids
    made = tuple(chunk_keys(root(tracker.namespace, chunk_size), tokens, chunk_size, tracker.extras))
    assert tracker.keys(range(len(made)), chunk_size) == made
    return made


def lora(folder, name="red", number=1):
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(folder))


def test_bl07_another_image_is_another_prompt_from_the_image_on(track):
    first = keys(track, mm_features=[image("f" * 60 + "0001")])
    other = keys(track, mm_features=[image("e" * 60 + "0001")])
    shifted = keys(track, mm_features=[image("f" * 60 + "0001", offset=261)])
    text = keys(track)
    for one, two in ((first, other), (first, shifted), (first, text), (other, shifted)):
        assert one[0] == two[0]
        assert one[1] != two[1]
    assert first == keys(track, mm_features=[image("f" * 60 + "0001")])


def test_bl08_adapter_salt_and_neither_are_four_chains(track, tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    adapter = keys(track, lora_request=lora(tmp_path))
    salted = keys(track, cache_salt="red")
    plain = keys(track)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"new weights")
    reloaded = keys(track, lora_request=lora(tmp_path))
    assert len({adapter[0], salted[0], plain[0], reloaded[0]}) == 4
    assert plain == tuple(chunk_keys(root(NAMESPACE, 256), TOKENS, 256))


def test_bl08_an_adapter_is_known_again(track, tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    first = keys(track, lora_request=lora(tmp_path))
    assert keys(track, lora_request=lora(tmp_path)) == first
    assert keys(TrackerFactory(NAMESPACE), lora_request=lora(tmp_path, number=7)) == first


def test_bl55_a_salt_that_is_no_text_is_not_cached_and_not_logged(track, caplog):
    with caplog.at_level(logging.WARNING):
        tracker = track(Request("r", TOKENS, cache_salt="tenant\x07secret"))
    assert not tracker.cacheable
    assert "salt" in caplog.text
    assert "tenant" not in caplog.text
    assert "secret" not in repr(tracker)


def test_an_adapter_that_cannot_be_read_is_not_cached(track, tmp_path):
    file = tmp_path / "adapter_model.safetensors"
    file.symlink_to(tmp_path / "missing")
    assert not track(Request("r", TOKENS, lora_request=lora(tmp_path))).cacheable


def test_a_long_request_id_has_a_session_of_its_own():
    assert session_id("r" * 256) == "r" * 256
    one, two = session_id("r" * 257), session_id("r" * 258)
    assert one != two
    assert len(one) <= 256


def test_the_fingerprint_does_not_depend_on_order():
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})


def test_weights_are_told_apart_by_their_ends(tmp_path):
    assert weights_digest(tmp_path / "nowhere") == b""
    big = bytearray(1 << 18)
    file = tmp_path / "model.safetensors"
    digests = set()
    for position in (0, len(big) - 1):
        big[position] = 1
        file.write_bytes(big)
        digests.add(weights_digest(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    digests.add(weights_digest(tmp_path))
    file.rename(tmp_path / "other.safetensors")
    digests.add(weights_digest(tmp_path))
    assert len(digests) == 3
