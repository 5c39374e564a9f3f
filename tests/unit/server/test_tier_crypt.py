"""AES-GCM at rest."""

from __future__ import annotations

import asyncio
import os

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvwire.errors import ConfigError
from kvwire.server.tiers.crypt import ID, NONCE, OVERHEAD, Damaged, Vault, WrongKey, read_vault

pytestmark = [pytest.mark.asyncio, pytest.mark.leakcheck("threads", "tasks")]

SECRET = bytes(range(32))
ONE, OTHER = b"\1" * 32, b"\2" * 32
ABOUT = b"server/root/layout/key.0" + b"header"


@pytest.fixture
def vault():
    vault = Vault(SECRET)
    yield vault
    vault.close()


async def sealed(vault, tenant, data, about=ABOUT) -> bytearray:
    return bytearray(b"".join(await vault.seal(tenant, about, [data])))


async def unsealed(vault, tenant, whole, about=ABOUT) -> bytes:
    into = bytearray(max(0, len(whole) - OVERHEAD))
    await vault.unseal(tenant, about, memoryview(whole), [memoryview(into)])
    return bytes(into)


@pytest.mark.parametrize("size", [0, 1, 16, 4096, (3 << 20) + 7])
async def test_what_was_sealed_is_unsealed(vault, size):
    data = os.urandom(size)
    whole = await sealed(vault, ONE, data)
    assert len(whole) == size + OVERHEAD
    assert not size > 16 or data not in whole
    assert await unsealed(vault, ONE, whole) == data


async def test_parts_may_be_divided_in_any_way(vault):
    data = os.urandom(1 << 20)
    whole = b"".join(await vault.seal(ONE, ABOUT, [data[:1], memoryview(data)[1:70_001], data[70_001:]]))
    into = [bytearray(333), bytearray(0), bytearray(len(data) - 333)]
    await vault.unseal(ONE, ABOUT, memoryview(whole), [memoryview(part) for part in into])
    assert b"".join(into) == data


async def test_every_object_has_a_nonce_of_its_own(vault):
    nonces = {bytes((await sealed(vault, ONE, b"same"))[ID : ID + NONCE]) for _ in range(100)}
    assert len(nonces) == 100


async def test_bl55_the_key_is_the_tenants(vault):
    whole = await sealed(vault, ONE, b"kv of one")
    for tenant in (OTHER, b""):
        with pytest.raises(WrongKey):
            await unsealed(vault, tenant, whole)
    assert await unsealed(vault, ONE, whole) == b"kv of one"


async def test_another_key_file_is_told_from_damage(vault):
    whole = await sealed(vault, ONE, b"kv")
    other = Vault(os.urandom(32))
    with pytest.raises(WrongKey):
        await unsealed(other, ONE, whole)
    other.close()


async def test_bl49_no_bit_may_change(vault):
    data = os.urandom(100)
    whole = await sealed(vault, ONE, data)
    for at in range(ID, len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1
        with pytest.raises(Damaged):
            await unsealed(vault, ONE, changed)
    with pytest.raises(Damaged):
        await vault.unseal(ONE, ABOUT, memoryview(whole)[:-1], [memoryview(bytearray(100))])


async def test_no_object_can_stand_in_for_another(vault):
    whole = await sealed(vault, ONE, b"kv")
    with pytest.raises(Damaged):
        await unsealed(vault, ONE, whole, about=ABOUT + b"!")


async def test_another_program_can_unseal_it(vault):
    """The format of docs/tiers.md, by other means."""
    whole = bytes(await sealed(vault, ONE, b"kv of one"))
    both = HKDF(SHA256(), 40, salt=ONE, info=b"kvwire l2 v1").derive(SECRET)
    assert whole[:8] == both[:8]
    assert AESGCM(both[8:]).decrypt(whole[8:20], whole[20:], ABOUT) == b"kv of one"


async def test_a_cancelled_seal_ends_when_nothing_reads_its_buffer_any_more(vault, monkeypatch):
    seal, steps = vault._seal, []

    def watched(*args):
        steps.append("begun")
        try:
            return seal(*args)
        finally:
            steps.append("ended")

    monkeypatch.setattr(vault, "_seal", watched)
    sealing = asyncio.create_task(vault.seal(ONE, ABOUT, [bytes(32 << 20)]))
    await asyncio.sleep(0.002)
    sealing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sealing
    assert steps in ([], ["begun", "ended"])


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [(b"x" * 31, 0o600, "31 bytes"), (b"x" * 32, 0o604, "everybody"), (None, 0o600, "No such file")],
)
async def test_a_bad_key_file_is_refused(tmp_path, content, mode, problem):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=problem):
        read_vault(str(path))


async def test_a_key_file_is_used_as_it_is(tmp_path, vault):
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    same = read_vault(str(path))
    assert await unsealed(same, ONE, await sealed(vault, ONE, b"kv")) == b"kv"
    same.close()
