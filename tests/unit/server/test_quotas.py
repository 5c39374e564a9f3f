"""Whose limit holds where: a server's own, its coordinators', in memory and below."""

from __future__ import annotations

import asyncio
import errno
import logging

import pytest

from kvwire.errors import InvalidArgument, StateUnavailable, TooManyItems
from kvwire.server.engine import make_store
from kvwire.server.quotas import L1, L2, Quotas
from kvwire.serving import intents
from kvwire.serving.intents import IntentStore
from kvwire.serving.state import StateFolder

RED, BLUE = "0123456789abcdef", "fedcba9876543210"


class FakeTier:
    def __init__(self, **used: int) -> None:
        self.limits: dict[str, int] = {}
        self._used = used

    def set_quotas(self, quotas) -> None:
        self.limits = dict(quotas)

    def tenants(self):
        return self._used


class Fixture:
    def __init__(self, folder=None, policy: str = "tenant") -> None:
        self.memory = make_store(1 << 20, policy)
        self.state = StateFolder(str(folder)) if folder is not None else None
        self.own = IntentStore(self.state) if self.state is not None else None
        self.quotas = Quotas(self.memory, self.own)

    @property
    def limits(self) -> dict[str, int]:
        return self.memory.tenants.limits

    async def close(self) -> None:
        if self.own is not None and self.state is not None:
            await self.own.close()
            self.state.close()


def test_of_all_limits_the_smallest_holds_and_none_has_no_salt():
    fixture = Fixture()
    fixture.quotas.set_fleet("one", {(RED, L1): 50, ("none", L1): 7, (BLUE, L2): 3})
    fixture.quotas.set_fleet("two", {(RED, L1): 40, (BLUE, L1): 9})
    assert fixture.limits == {RED: 40, "": 7, BLUE: 9}
    fixture.quotas.set_fleet("two", {})
    assert fixture.limits == {RED: 50, "": 7}
    fixture.quotas.set_fleet("one", {})
    assert fixture.limits == {}


def test_what_a_coordinator_says_wrongly_is_left_out():
    fixture = Fixture()
    fixture.quotas.set_fleet(
        "one", {("red", L1): 5, ("", L1): 5, (RED, L1): 0, (BLUE, 9): 5, ("none", L1): 6}
    )
    assert fixture.limits == {"": 6}


@pytest.mark.asyncio
async def test_its_own_limits_are_persisted_before_they_hold(tmp_path, monkeypatch):
    fixture = Fixture(tmp_path / "state")
    await fixture.quotas.set(RED, L1, 100)
    fixture.quotas.set_fleet("one", {(RED, L1): 200})
    assert fixture.limits == {RED: 100}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(StateUnavailable):
            await fixture.quotas.set(RED, L1, 10)
    assert fixture.limits == {RED: 100}
    await fixture.quotas.set(RED, L1, 0)
    assert fixture.limits == {RED: 200}
    await fixture.quotas.set("none", L1, 5)
    await fixture.close()
    again = Fixture(tmp_path / "state")
    assert again.limits == {"": 5}
    await again.close()


@pytest.mark.asyncio
async def test_many_at_once_and_more_than_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(intents, "MAX_QUOTAS", 8)
    fixture = Fixture(tmp_path / "state")
    names = [f"{number:016x}" for number in range(10)]
    done = await asyncio.gather(
        *(fixture.quotas.set(name, L1, 1 + number) for number, name in enumerate(names)),
        return_exceptions=True,
    )
    assert [isinstance(each, TooManyItems) for each in done] == [False] * 8 + [True] * 2
    assert fixture.limits == {name: 1 + number for number, name in enumerate(names[:8])}
    await fixture.close()


@pytest.mark.asyncio
async def test_a_tier_is_told_what_holds_there_whenever_it_comes(tmp_path):
    fixture = Fixture(tmp_path / "state", policy="lru")
    for tier, missing in ((L1, "--policy tenant"), (L2, "--l2")):
        with pytest.raises(InvalidArgument, match=missing):
            await fixture.quotas.set(RED, tier, 5)
    fixture.quotas.set_fleet("one", {(RED, L2): 60, (RED, L1): 3})
    disk, redis = FakeTier(**{RED: 10, BLUE: 20}), FakeTier()
    fixture.quotas.attach("disk", disk)
    fixture.quotas.attach("redis", redis)
    assert disk.limits == redis.limits == {RED: 60}
    await fixture.quotas.set(RED, L2, 50)
    await fixture.quotas.set("none", L2, 5)
    assert disk.limits == redis.limits == {RED: 50, "": 5}
    assert fixture.limits == {}
    shown = [(each.tenant, each.backend, each.limit, each.used) for each in fixture.quotas.listed()]
    assert shown == [
        ("none", "disk", 5, 0),
        (RED, "disk", 50, 10),
        (BLUE, "disk", 0, 20),
        ("none", "redis", 5, 0),
        (RED, "redis", 50, 0),
    ]
    assert [each.backend for each in fixture.quotas.listed(RED)] == ["disk", "redis"]
    assert list(fixture.quotas.listed("0" * 16)) == []
    await fixture.close()


@pytest.mark.asyncio
async def test_what_does_not_hold_is_told(tmp_path, caplog):
    fixture = Fixture(tmp_path / "state")
    await fixture.quotas.set(RED, L1, 5)
    await fixture.close()
    with caplog.at_level(logging.WARNING):
        again = Fixture(tmp_path / "state", policy="arc")
        again.quotas.started()
        again.quotas.set_fleet("one", {(RED, L2): 5})
    assert "--state has quotas that do not hold here: quotas in memory need --policy tenant" in caplog.text
    assert "one has quotas that do not hold here: this server has no L2 tier" in caplog.text
    assert list(again.quotas.listed()) == []
    await again.close()
