"""Google Cloud Storage and Azure, against servers of ours that speak what is needed of their protocols."""

from __future__ import annotations

import asyncio
import os

import pytest

from kvwire.errors import ConfigError
from kvwire.server.tiers.backends import make_backend
from kvwire.server.tiers.backends.base import NotFound, Place, Refused, Unavailable, WrongSize
from support.cloud_servers import AZURE_ENV, BUCKET, cloud_server, google_env
from support.storages import listed, opened, read

pytestmark = [pytest.mark.asyncio, pytest.mark.leakcheck("tasks")]


@pytest.fixture(params=["gs", "az"])
def place(request, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with cloud_server(azure=request.param == "az") as url:
        for name, value in (AZURE_ENV if request.param == "az" else google_env(url)).items():
            monkeypatch.setenv(name, value)
        yield Place(request.param, BUCKET, "kv", endpoint=url)


async def test_values_are_written_read_listed_and_deleted(place):
    names = [f"ns{n % 2}/{n:03}.0" for n in range(250)]
    async with opened(place) as backend:
        data = os.urandom(1 << 20)
        await backend.write("large", [data[:7], data[7:]])
        assert await read(backend, "large", 1 << 20) == data
        await asyncio.gather(*(backend.write(name, [b"x" * 9]) for name in names))
        assert await listed(backend) == {"large": 1 << 20, **dict.fromkeys(names, 9)}
        assert len(await listed(backend, "ns1/")) == 125
        with pytest.raises(NotFound):
            await read(backend, "ns1/none", 9)
        with pytest.raises(WrongSize):
            await read(backend, "large", 9)
        await backend.delete([*names, "nowhere"])
        assert await listed(backend) == {"large": 1 << 20}


async def test_a_bucket_that_does_not_exist_is_refused(place):
    other = Place(place.scheme, "other", "kv", endpoint=place.endpoint)
    backend = make_backend(other)
    with pytest.raises(Refused):
        await backend.open()
    with pytest.raises(Refused):
        await backend.write("a", [b"x"])
    await backend.close()


@pytest.mark.parametrize("scheme", ["gs", "az"])
async def test_nobody_there_is_unavailable(scheme, monkeypatch):
    url = "http://127.0.0.1:9"
    for name, value in {**AZURE_ENV, **google_env(url), "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    backend = make_backend(Place(scheme, BUCKET, "kv", endpoint=url, timeout=2.0))
    with pytest.raises(Unavailable):
        await backend.open()
    with pytest.raises(Unavailable):
        await backend.write("a", [b"x"])
    await backend.close()


async def test_azure_wants_to_know_the_account(monkeypatch):
    for name in AZURE_ENV:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"az://box.*Account"):
        make_backend(Place("az", "box"))
