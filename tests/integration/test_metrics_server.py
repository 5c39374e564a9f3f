"""BL-67 at a real server: what /metrics counts, and when."""

from __future__ import annotations

import os
import urllib.request

import pytest

from kvwire.cli.bench.processes import kvwire_server, work_folder
from kvwire.cli.bench.prompts import Prompt, Prompts
from kvwire.client import Client, EndRetrieveItem, SessionRange, TransferItem

LENGTH = 512
CHUNK = 256


@pytest.fixture
def server():
    with work_folder() as folder:
        flags = ["--l1-size", "16MiB", "--http", "127.0.0.1:0"]
        with kvwire_server(folder, flags) as address, Client(address) as client:
            log = (folder / "kvwire server.log").read_text()
            yield Prompts(client), log.split("http://")[1].split("/")[0]


def scrape(http):
    text = urllib.request.urlopen(f"http://{http}/metrics", timeout=5).read().decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def tokens(found):
    return (
        found["kvwire_lookup_asked_tokens_total"],
        found['kvwire_lookup_hit_tokens_total{tier="memory"}'],
        found["kvwire_lookup_missed_tokens_total"],
    )


def look_up(prompts, prompt, session):
    return prompts.client.lookup(
        prompts.namespace, prompt.tokens, registration_id=prompts.registration_id, session_id=session
    )


def test_bl67_each_request_counts_once_at_its_lookup(server):
    prompts, http = server
    full = prompts.stored(LENGTH)
    half = Prompt(full.tokens[: CHUNK * 4] + prompts.absent(CHUNK).tokens, hit=False)
    none = prompts.absent(LENGTH)
    before = tokens(scrape(http))
    for number, prompt in enumerate([full] * 5 + [half] * 3 + [none] * 2):
        for _ in range(100 if number == 0 else 2):
            found = look_up(prompts, prompt, f"request-{number}")
        assert found.asked_chunks == 2
    asked, hit, missed = (after - start for after, start in zip(tokens(scrape(http)), before, strict=True))
    assert asked == 10 * LENGTH
    assert hit == 5 * LENGTH + 3 * CHUNK
    assert hit / asked == 0.65
    assert missed == asked - hit


def test_bl67_a_request_that_comes_back_with_a_longer_hit_takes_nothing_away(server):
    prompts, http = server
    full = prompts.stored(LENGTH)
    start = Prompt(full.tokens[: CHUNK * 4], hit=True)
    before = tokens(scrape(http))
    for prompt in (start, full, start, full):
        look_up(prompts, prompt, "preempted")
    asked, hit, missed = (after - start for after, start in zip(tokens(scrape(http)), before, strict=True))
    assert (asked, hit, missed) == (LENGTH, LENGTH, 0)


def test_bl67_what_was_read_and_what_failed_are_counters_of_their_own(server):
    prompts, http = server
    client, registration = prompts.client, prompts.registration_id
    full = prompts.stored(LENGTH)
    look_up(prompts, full, "reader")
    item = TransferItem(SessionRange("reader", 0, 2))
    (grant,) = client.begin_retrieve(registration, [item])
    before = scrape(http)
    assert client.end_retrieve(registration, [EndRetrieveItem(grant.ticket.lease_id)]) == [True]
    after = scrape(http)
    read = 'kvwire_retrieved_bytes_total{path="inline"}'
    assert after[read] - before.get(read, 0.0) == 2 * 64
    assert tokens(after) == tokens(before)
    assert client.end_retrieve(registration, [EndRetrieveItem(grant.ticket.lease_id)]) == [False]
    (missing,) = client.begin_retrieve(registration, [TransferItem(SessionRange(os.urandom(4).hex(), 0, 1))])
    assert missing.error is not None
    failed = scrape(http)
    assert failed[f'kvwire_failures_total{{reason="{missing.error.reason}"}}'] == 1
    assert sum(value for name, value in failed.items() if name.startswith("kvwire_failures_total")) == 2
    assert failed[read] == after[read]
