"""A server with a lower tier: what it keeps, and what it says of it."""

from __future__ import annotations

from support.raw_client import OBJECT_BYTES, RawClient, content, tokens
from support.server_process import server_process
from support.waiting import eventually

STORED = OBJECT_BYTES + 64
MANIFEST = 4096


def written(client: RawClient, objects: int):
    """The only tier's status once it has so many objects and waits for no other."""

    def look():
        (tier,) = client.status().tiers
        return tier if tier.objects == objects and not tier.queued_objects else None

    return eventually(look)


def files(folder) -> dict[str, int]:
    found = {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }
    return {name: size for name, size in found.items() if not name.startswith(".")}


def tier_of(folder, **query) -> str:
    asked = {"size": "64MiB", **query}
    return f"file://{folder}?" + "&".join(f"{name}={value}" for name, value in asked.items())


def test_bl49_a_killed_server_finds_what_it_has_written(short_tmp):
    folder = short_tmp / "kv"
    flags = (f"--l2={tier_of(folder)}", "--server-id=a", "--chunk-size=4")
    with server_process(short_tmp, *flags) as server:
        client = RawClient(server.channel()).register("inline")
        client.store("s", tokens(6))
        written(client, 6)
        # In the middle of another store.
        client.lookup("t", tokens(6, seed=1))
        ticket = client.begin_store("t", 0, 6).ticket
        half = client.pieces(
            ticket, [content(key) for key in client.keys(tokens(6, seed=1))], 3 * OBJECT_BYTES
        )
        client.stub.WriteChunks(half, timeout=10)
        server.kill()
    with server_process(short_tmp, *flags) as server:
        client = RawClient(server.channel()).register("inline")
        reply = client.lookup("s", tokens(6))
        assert (reply.hit_chunks, reply.l2_chunks) == (6, 6)
        client.end_session("s")
        assert client.retrieve("s", tokens(6)) == [content(key) for key in client.keys(tokens(6))]
        assert client.lookup("t", tokens(6, seed=1)).hit_chunks == 0
        (tier,) = client.status().tiers
        assert tier.used_bytes == sum(files(folder).values()) == 6 * STORED + MANIFEST
        assert (tier.read_objects, tier.failed_reads, tier.damaged_objects) == (6, 0, 0)
