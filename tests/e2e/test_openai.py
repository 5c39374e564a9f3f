"""vLLM's OpenAI server over HTTP: one server for all tests here, the last of which ends it."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest

from e2e.harness import SHELF, Server, expected, prompt, transfer_config
from e2e.openai_server import OpenAiServer, words

HITS = "vllm:external_prefix_cache_hits_total"
STREAM = [prompt(length, seed=1000 + length) for length in (200, 193, 192, 191, 137, 129, 128, 65)]
pytestmark = pytest.mark.timeout(300)


# So few that a prompt is soon forgotten by the engine itself.
BLOCKS = ("--num-gpu-blocks-override", "28")


@pytest.fixture(scope="module")
def cache():
    folder = Path(tempfile.mkdtemp(prefix="kvw-", dir="/tmp"))
    started = Server(folder)
    yield started
    started.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def starting(cache):
    folder = Path(tempfile.mkdtemp(prefix="kvw-", dir="/tmp"))
    started = OpenAiServer(folder, "llama", transfer_config(cache.address), *BLOCKS)
    yield started
    started.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def right(starting, baseline):
    """What an engine without kvwire says, in words."""
    asked = [*SHELF, *STREAM]
    return {tuple(tokens): words(said) for tokens, said in zip(asked, baseline("llama", *asked), strict=True)}


@pytest.fixture(scope="module")
def openai(starting, right):
    starting.wait_ready()
    return starting


def assert_no_complaint(openai):
    log = openai.log()
    assert "Traceback" not in log
    assert "the engine goes on without it" not in log


def test_what_was_stored_is_found_when_the_engine_has_forgotten_it(openai, cache, right):
    """Prompts of exact chunk multiples, one more, one less, and shorter ones."""
    for tokens in SHELF:
        first = openai.complete(tokens)
        assert (first.text, first.cached) == (right[tuple(tokens)], 0)
    assert openai.metric(HITS) == 0
    openai.forget()
    found = 0
    for tokens in SHELF:
        again = openai.complete(tokens)
        assert (again.text, again.cached) == (right[tuple(tokens)], expected("llama", len(tokens)))
        found += again.cached
    assert openai.metric(HITS) == found > 0
    # The last one the engine has itself now: nothing is loaded that it does not need.
    last = openai.complete(SHELF[-1])
    assert last.text == right[tuple(SHELF[-1])]
    assert openai.metric(HITS) == found
    cache.assert_at_rest()
    assert_no_complaint(openai)


def ask(openai, tokens, **params):
    """The whole reply, with what it says of kvwire."""
    given = {f"kvwire.{name}": value for name, value in params.items()}
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return openai.post("/v1/completions", {**body, "kv_transfer_params": given})


def test_requests_say_what_they_want_and_are_told_what_they_got(openai, cache):
    tokens = prompt(200, seed=3000)
    assert ask(openai, tokens)["kv_transfer_params"] is None
    openai.forget()
    told = ask(openai, tokens, stats=True)["kv_transfer_params"]["kvwire"]
    assert (told["prompt_tokens"], told["loaded_tokens"], told["reason"]) == (200, 192, "")
    openai.forget()
    told = ask(openai, tokens, stats=True, load=False)["kv_transfer_params"]["kvwire"]
    assert told["loaded_tokens"] == 0
    told = ask(openai, tokens, laod="no", stats=True)["kv_transfer_params"]["kvwire"]
    assert told["prompt_tokens"] == 200
    cache.assert_at_rest()


def test_the_engines_own_metrics_tell_of_kvwire(openai):
    loaded = openai.metric("vllm:kvwire_loaded_tokens_total")
    assert loaded == openai.metric(HITS) > 0
    assert openai.metric("vllm:kvwire_lookup_hit_tokens_total") >= loaded
    assert openai.metric("vllm:kvwire_loaded_bytes_total") > 0
    assert openai.metric("vllm:kvwire_stored_bytes_total") > 0
    assert openai.metric("vllm:kvwire_load_seconds_count") == openai.metric("vllm:kvwire_loads_total") > 0
    assert openai.metric("vllm:kvwire_usable") == 1


def test_resetting_the_prefix_cache_empties_the_server_too(openai, cache):
    assert cache.status().memory.chunks > 0
    openai.forget("?reset_external=true")
    assert cache.status().memory.chunks == 0


class Requests(threading.Thread):
    """A user who asks for one prompt after the other until told to stop."""

    def __init__(self, openai, prompts):
        super().__init__(daemon=True)
        self.answers = []
        self.error = None
        self.enough = threading.Event()
        self._openai = openai
        self._prompts = prompts

    def run(self):
        try:
            while not self.enough.is_set():
                for tokens in self._prompts:
                    self.answers.append((tuple(tokens), self._openai.complete(tokens).text))
        except Exception as error:  # noqa: BLE001  the test says what it was
            self.error = error


def test_a_restart_in_the_middle_of_a_stream_of_requests(openai, cache, right):
    """kill -9 while requests are looked up, loaded, stored: all finish, and hits come back by themselves."""
    hits = openai.metric(HITS)
    users = [Requests(openai, STREAM[index:] + STREAM[:index]) for index in range(0, len(STREAM), 2)]
    for user in users:
        user.start()
    wait_for_more_answers(users, 2 * len(STREAM))
    assert openai.metric(HITS) > hits
    cache.kill()
    wait_for_more_answers(users)
    cache.start()
    wait_for_more_answers(users, 2 * len(STREAM))
    until_it_hits(openai, right)
    for user in users:
        user.enough.set()
    for user in users:
        user.join(60)
        assert not user.is_alive()
        assert user.error is None
        assert [text for _, text in user.answers] == [right[tokens] for tokens, _ in user.answers]
    cache.assert_at_rest()
    assert_no_complaint(openai)


def until_it_hits(openai, right, timeout=20):
    """Among the others' requests: a prompt that the engine has to have from kvwire."""
    deadline = time.monotonic() + timeout
    hits = openai.metric(HITS)
    while openai.metric(HITS) == hits:
        assert time.monotonic() < deadline, openai.log()[-4000:]
        assert openai.complete(STREAM[0]).text == right[tuple(STREAM[0])]


def wait_for_more_answers(users, count=4):
    wanted = [len(user.answers) + count for user in users]
    deadline = time.monotonic() + 60
    while any(len(user.answers) < number for user, number in zip(users, wanted, strict=True)):
        assert time.monotonic() < deadline
        assert [user.error for user in users] == [None] * len(users)
        time.sleep(0.02)


def test_kill_9_of_the_whole_engine_leaves_nothing_in_the_cache_server(openai, cache, right):
    """While requests are stored. What it had stored before is there for the next engine."""
    chunks = cache.status().memory.used_bytes
    user = Requests(openai, [prompt(200, seed=seed) for seed in range(2000, 2100)])
    user.start()
    wait_for_more_answers([user])
    openai.kill()
    user.join(30)
    assert not user.is_alive()
    assert user.error is not None
    deadline = time.monotonic() + 20
    while cache.status().registrations:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cache.assert_at_rest()
    assert cache.status().memory.used_bytes >= chunks
