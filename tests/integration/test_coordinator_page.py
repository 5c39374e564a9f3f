"""The fleet's page: what it serves, and what a browser shows of it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import urllib.request
from contextlib import contextmanager, suppress

import grpc
import pytest

from kvwire.v1 import coordinator_service_pb2 as pb
from support.browser import CHROMIUM, browse
from support.coordinator_process import coordinator_process
from support.fleet_member import Member, store
from support.waiting import eventually

HOSTILE = "<img src=x onerror=alert(1)>"
SETTINGS = ("--http=127.0.0.1:0", "--heartbeat=0.2", "--expire-after=3", "--silent-after=0.4")
in_browser = pytest.mark.skipif(
    not CHROMIUM.exists(), reason="needs Chromium: scripts/programs.sh installs it"
)


@pytest.fixture
def coordinator(short_tmp):
    with coordinator_process(short_tmp, *SETTINGS) as started:
        yield started


def url(coordinator) -> str:
    return f"http://{re.search(r'http://([^/]+)/', coordinator.output()).group(1)}/"


class Alive:
    """Gives a member's life signs. `ahead`: it says that it has closed more batches than have come."""

    def __init__(self, member: Member) -> None:
        self.member, self.ahead = member, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def _beat(self) -> None:
        member = self.member
        while not self._stop.wait(0.1):
            tier = pb.TierUsage(tier=1, backend="memory", used_bytes=3 << 30, capacity_bytes=8 << 30)
            request = pb.HeartbeatRequest(
                server_id=member.server_id,
                incarnation=member.incarnation,
                last_sequence=member.sequence + self.ahead,
                asked_tokens=1000,
                hit_tokens=625,
                tiers=[tier],
            )
            # The coordinator may be dead by now, or another one.
            try:
                member.stub.Heartbeat(request)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    with suppress(grpc.RpcError):
                        member.register()

    def __enter__(self):
        self.member.register()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def members(coordinator, short_tmp):
    with named(coordinator, "one", short_tmp) as one, named(coordinator, HOSTILE, short_tmp) as two:
        yield one, two


@contextmanager
def named(coordinator, server_id, folder):
    # The address of its socket must be a legal path, whatever its name is.
    with Member(coordinator, f"m{server_id.encode().hex()[:8]}", folder) as member:
        member.server_id = server_id
        with Alive(member) as life:
            yield life


def test_the_page_and_its_state(coordinator, members):
    one, _two = members
    with urllib.request.urlopen(url(coordinator), timeout=5) as reply:  # noqa: S310
        page = reply.read().decode()
        assert "script-src 'sha256-" in reply.headers["Content-Security-Policy"]
        assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", page)
    assert "innerHTML" not in page

    def state():
        return json.loads(coordinator.get("/state.json")[1])

    def current():
        known = state()["members"]
        return [(each["reporting"], each["asked"]) for each in known] == [("current", 1000)] * 2

    eventually(current)
    one.member.tell(store(1, size=500), store(2, size=500))
    found = eventually(lambda: state() if max(state()["rates"]) else None)
    assert found["summary"]["keys"] == 2
    assert found["summary"]["bytes"] == 1000
    shown = {each["id"]: each for each in found["members"]}
    assert shown["one"]["placements"] == 2
    assert shown["one"]["tiers"][0] == {
        "tier": "L1",
        "backend": "memory",
        "used": 3 << 30,
        "capacity": 8 << 30,
    }
    one.ahead = 5
    eventually(lambda: state()["summary"]["silent"] == 1)
    one.stop()
    assert [each["id"] for each in eventually(lambda: state()["left"])] == ["one"]
    with urllib.request.urlopen(url(coordinator) + "events", timeout=5) as stream:  # noqa: S310
        lines = [stream.readline() for _ in range(3)]
    assert lines[0] == b"retry: 1000\n"
    assert json.loads(lines[2].removeprefix(b"data: "))["members"][0]["id"] == HOSTILE


@in_browser
def test_a_browser_shows_the_fleet_as_it_changes(coordinator, members, short_tmp):
    one, _two = members
    asyncio.run(_look(coordinator, one, short_tmp))


async def _look(coordinator, one, folder):
    async with browse(url(coordinator)) as page:
        card = "[...document.querySelectorAll('#members .card')]"
        await page.until(f"{card}.filter((c) => c.innerText.includes('events current')).length === 2")
        assert await page.value(f"{card}.map((c) => c.querySelector('h3').textContent)") == [HOSTILE, "one"]
        assert not await page.value("document.querySelectorAll('img').length")
        shown = await page.text("#members .card:nth-child(2)")
        for word in ("alive", "3 GiB of 8 GiB", "62.5 %", "placements"):
            assert word in shown
        assert await page.text("#state") == "live"
        one.ahead = 5
        await page.until(f"{card}.some((c) => c.innerText.includes('events silent'))")
        await page.until("document.getElementById('spoken').textContent.includes('one: events')")
        await page.resize(360, 740)
        assert await page.value("document.documentElement.scrollWidth") <= 360
        one.stop()
        await page.until("document.getElementById('left').innerText.includes('one')")
        assert not page.complaints
        coordinator.kill()
        await page.until("document.getElementById('state').textContent === 'connection lost, retrying'")
        http = f"--http={url(coordinator).removeprefix('http://').strip('/')}"
        with coordinator_process(folder, http, *SETTINGS[1:], listen=coordinator.address):
            await page.until("document.getElementById('state').textContent === 'live'")
            await page.until(f"{card}.map((c) => c.querySelector('h3').textContent).includes({HOSTILE!r})")
            assert not await page.value("document.body.classList.contains('stale')")
