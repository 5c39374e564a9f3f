"""Servers killed and restarted under an engine's traffic: a load brings the right bytes, or fails."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest

from kvwire.client import Client
from support.rank_engine import CHUNK, RankEngine, engine_layout, wait_until
from support.server_process import server_process

FLAGS = ("--chunk-size=64", "--l1-size=8MiB")
PROMPTS, CHUNKS, STORED_AT, LOADED_AT = 12, 2, 0, 20
KILLS = 4


def tokens(prompt):
    return [prompt] * (CHUNKS * CHUNK)


def write(engine, prompt):
    for number, rank in enumerate(engine.ranks):
        for layer in rank.kv[0]:
            layer[STORED_AT : STORED_AT + 4 * CHUNKS] = 2 * prompt + number + 1


def is_right(engine, prompt):
    blocks = slice(LOADED_AT, LOADED_AT + 4 * CHUNKS)
    return [
        all((layer[blocks] == 2 * prompt + number + 1).all() for layer in rank.kv[0])
        for number, rank in enumerate(engine.ranks)
    ]


class Traffic:
    """Requests one after the other, as an engine makes them: what is found is loaded, the rest is stored."""

    def __init__(self, engine):
        self.engine = engine
        self.loaded = self.failed = self.stored = 0
        self.wrong = []
        self.errors = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self):
        choose = random.Random(5)
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                self._request(f"r{number}", choose.randrange(PROMPTS))
            except BaseException as error:  # noqa: BLE001 - the test raises it
                self.errors.append(error)
                return

    def _request(self, name, prompt):
        engine = self.engine
        found = engine.found(name, tokens(prompt))
        if found == CHUNKS * CHUNK:
            for rank in engine.ranks:
                for layer in rank.kv[0]:
                    layer[LOADED_AT : LOADED_AT + 4 * CHUNKS] = 0
            loads = engine.load(engine.job(name, range(CHUNKS), LOADED_AT))
            good = [not load.failed for load in loads]
            self.wrong += [
                prompt for ok, right in zip(good, is_right(engine, prompt), strict=True) if ok > right
            ]
            self.loaded += all(good)
            self.failed += not all(good)
        else:
            write(engine, prompt)
            self.stored += not any(each.failed for each in engine.store(engine.job(name, range(CHUNKS))))
        engine.scheduler.release_lookup(name)
        engine.scheduler.end_session(name)
        for rank in engine.ranks:
            rank.worker.get_finished({name})


@pytest.mark.timeout(120)
def test_bl32_what_is_loaded_is_right_whatever_is_killed(short_tmp):
    with contextlib.ExitStack() as stack:
        folders = [short_tmp / name for name in "ab"]
        servers = []
        for folder in folders:
            folder.mkdir()
            servers.append(stack.enter_context(server_process(folder, *FLAGS)))
        engine = RankEngine([server.address for server in servers], engine_layout())
        stack.callback(engine.close)
        with Traffic(engine) as traffic:
            for turn in range(KILLS):
                loaded = traffic.loaded
                wait_until(lambda loaded=loaded: traffic.errors or traffic.loaded > loaded + 20, 30)
                servers[turn % 2].kill()
                time.sleep(0.2 * turn)
                servers[turn % 2] = stack.enter_context(server_process(folders[turn % 2], *FLAGS))
            loaded = traffic.loaded
            wait_until(lambda: traffic.errors or traffic.loaded > loaded + 20, 30)
        assert not traffic.errors, traffic.errors
        assert not traffic.wrong
        assert traffic.stored > PROMPTS
        for server in servers:
            with Client(server.address) as client:
                wait_until(lambda client=client: not client.status().sessions)
