from __future__ import annotations

import logging
from dataclasses import fields

import pytest

from kvwire.vllm.params import RequestParams, answer, request_params
from kvwire.vllm.requests import TrackerFactory
from kvwire.vllm.tracker import Account
from support.fake_engine import NAMESPACE, Request

DEFAULTS = RequestParams(save_decode=True)


def test_each_key_is_taken():
    given = {
        "kvwire.load": False,
        "kvwire.store": False,
        "kvwire.save_decode": False,
        "kvwire.max_hit_tokens": 512,
        "kvwire.stats": True,
    }
    assert set(given) == {f"kvwire.{each.name}" for each in fields(RequestParams)}
    parsed = request_params(given, DEFAULTS)
    assert not parsed.problems
    assert parsed.params == RequestParams(
        load=False, store=False, save_decode=False, max_hit_tokens=512, stats=True
    )


@pytest.mark.parametrize("given", [None, {}, [], "kvwire.load", 7, {"do_remote_prefill": True, 3: 4}])
def test_what_is_not_ours_is_left_alone(given):
    parsed = request_params(given, DEFAULTS)
    assert parsed.params == DEFAULTS
    assert not parsed.problems


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("kvwire.stor", False, "did you mean kvwire.store?"),
        ("kvwire.frobnicate", 1, "kvwire.max_hit_tokens"),
        ("kvwire.load", "no", "of type str and must be of type bool"),
        ("kvwire.load", None, "NoneType"),
        ("kvwire.load", 0, "of type int"),
        ("kvwire.max_hit_tokens", True, "of type bool"),
        ("kvwire.max_hit_tokens", -1, "negative"),
        ("kvwire.max_hit_tokens", 1.5, "of type float"),
    ],
)
def test_a_wrong_key_is_named_and_the_others_hold(key, value, told):
    parsed = request_params({key: value, "kvwire.stats": True}, DEFAULTS)
    assert parsed.params == RequestParams(save_decode=True, stats=True)
    (problem,) = parsed.problems
    assert repr(key) in problem
    assert told in problem


def test_a_value_is_never_quoted():
    (problem,) = request_params({"kvwire.load": "a secret"}, DEFAULTS).problems
    assert "secret" not in problem


def test_the_same_mistake_is_logged_once(caplog):
    track = TrackerFactory(NAMESPACE)
    with caplog.at_level(logging.WARNING, "kvwire"):
        for number in range(3):
            params = {"kvwire.stor": False, "kvwire.load": False}
            tracker = track(Request(f"r{number}", range(100), kv_transfer_params=params))
            assert tracker.params == RequestParams(load=False)
    (record,) = caplog.records
    assert "r0" in record.getMessage()
    assert "kvwire.stor" in record.getMessage()


def test_an_answer_sent_on_with_another_request_is_no_mistake():
    given = answer(Account(local=64, loaded=128), 200)
    assert given["kvwire"]["loaded_tokens"] == 128
    assert not request_params(given, DEFAULTS).problems
