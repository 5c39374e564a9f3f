"""Golden messages: the bytes that go over the wire, beside the same message as protobuf JSON.

    python proto/testdata/make_messages.py            writes messages.json
    python proto/testdata/make_messages.py --check    compares

A client in any language can check its stubs by them: parse `wire` and compare with `json`. Implementations
may order fields differently, so what they write is compared by what it parses to.
The bytes are made here field by field, after the encoding that protobuf documents, not by a library.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
from pathlib import Path

TARGET = Path(__file__).with_name("messages.json")
KEY = bytes(range(32))
INCARNATION = bytes(range(16))


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def chunk(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def text(field: int, value: str) -> bytes:
    return chunk(field, value.encode())


def base64_of(value: bytes) -> str:
    return base64.b64encode(value).decode()


def golden() -> list[dict[str, object]]:
    header = chunk(1, chunk(1, INCARNATION))
    header_json = {"incarnation": base64_of(INCARNATION)}
    namespace = text(1, "meta-llama/Llama-3.1-8B") + text(3, "bfloat16") + text(5, "red")
    namespace_json = {"model": "meta-llama/Llama-3.1-8B", "kvDtype": "bfloat16", "adapter": "red"}
    tokens = struct.pack("<4I", 1, 2, 3, 4294967295)
    group = number(1, 2) + number(2, 16) + number(3, 512) + number(4, 15) + number(5, 1 << 33) + number(6, 8)
    group_json = {
        "kind": "KV_GROUP_KIND_SLIDING_WINDOW",
        "spanTokens": 16,
        "windowTokens": 512,
        "numLayers": 15,
        "blockBytes": str(1 << 33),
        "blocksPerObject": 8,
    }
    slot = number(1, 3) + number(2, 1) + number(3, 33554432) + number(4, 4096)
    slot_json = {"chunkIndex": 3, "groupIndex": 1, "sizeBytes": "33554432", "arenaOffset": "4096"}
    ticket = number(1, 7) + number(2, 1) + chunk(3, number(1, 30)) + chunk(5, slot)
    ticket_json = {"leaseId": "7", "path": "DATA_PATH_SHM", "expiresIn": "30s", "slots": [slot_json]}
    session = text(1, "req-1") + number(2, 3) + number(3, 2)
    session_json = {"sessionId": "req-1", "firstChunk": 3, "chunkCount": 2}
    event = number(1, 1) + chunk(2, KEY) + number(3, 1) + text(4, "memory") + number(5, 4096)
    event_json = {
        "kind": "CACHE_EVENT_KIND_STORE",
        "chunkKey": base64_of(KEY),
        "tier": "STORAGE_TIER_L1",
        "backend": "memory",
        "sizeBytes": "4096",
    }
    error = (
        number(1, 21) + text(2, "Lease 7 has ended before.") + chunk(3, text(1, "lease_id") + text(2, "7"))
    )
    error_json = {
        "reason": "ERROR_REASON_LEASE_LOST",
        "message": "Lease 7 has ended before.",
        "metadata": {"lease_id": "7"},
    }
    extra = chunk(1, b"\xff\x00image") + number(2, 260) + number(3, 141)
    extra_json = {"digest": base64_of(b"\xff\x00image"), "start": 260, "length": 141}
    return [
        message(
            "NegotiateChunkSizeRequest",
            number(1, 544) + text(2, "vllm"),
            {"requiredAlignment": "544", "clientName": "vllm"},
        ),
        message(
            "LookupRequest",
            number(1, (1 << 63) - 1)
            + text(2, "req-1")
            + chunk(3, namespace)
            + chunk(4, tokens)
            + chunk(6, extra),
            {
                "registrationId": str((1 << 63) - 1),
                "sessionId": "req-1",
                "namespace": namespace_json,
                "tokens": base64_of(tokens),
                "extraInputs": [extra_json],
            },
        ),
        message(
            "LookupResponse",
            header
            + number(2, 9)
            + number(3, 8)
            + number(4, 2048)
            + number(5, 4294967295)
            + chunk(6, number(1, 59) + number(2, 500000000)),
            {
                "header": header_json,
                "askedChunks": 9,
                "hitChunks": 8,
                "hitTokens": "2048",
                "leaseId": "4294967295",
                "expiresIn": "59.500s",
            },
        ),
        message("KvLayout", number(1, 8) + chunk(2, group), {"worldSize": 8, "groups": [group_json]}),
        message(
            "BeginStoreRequest",
            number(1, 5) + chunk(2, chunk(1, session) + chunk(3, number(1, 1) + number(2, 3) + number(3, 1))),
            {
                "registrationId": "5",
                "items": [
                    {"session": session_json, "ranges": [{"groupIndex": 1, "firstChunk": 3, "chunkCount": 1}]}
                ],
            },
        ),
        message(
            "BeginStoreResponse",
            header + chunk(2, chunk(1, ticket) + number(2, 1)) + chunk(2, chunk(5, error)),
            {
                "header": header_json,
                "results": [{"ticket": ticket_json, "alreadyStored": 1}, {"error": error_json}],
            },
        ),
        message(
            "CommitStoreRequest",
            number(1, 5)
            + chunk(
                2,
                number(1, 7)
                + chunk(2, varint(0) + varint(300))
                + chunk(3, INCARNATION)
                + chunk(3, INCARNATION),
            ),
            {
                "registrationId": "5",
                "items": [
                    {
                        "leaseId": "7",
                        "slots": [0, 300],
                        "checksums": [base64_of(INCARNATION), base64_of(INCARNATION)],
                    }
                ],
            },
        ),
        message(
            "CacheEventBatch",
            text(1, "host-1") + chunk(2, INCARNATION) + number(3, 42) + chunk(6, event),
            {
                "serverId": "host-1",
                "incarnation": base64_of(INCARNATION),
                "sequence": "42",
                "events": [event_json],
            },
        ),
        message("PingRequest", b"", {}),
    ]


def message(name: str, wire: bytes, told: dict[str, object]) -> dict[str, object]:
    return {"type": f"kvwire.v1.{name}", "json": told, "wire": base64_of(wire)}


def main() -> int:
    text_now = (
        json.dumps({"about": "see make_messages.py; `wire` is base64", "messages": golden()}, indent=2) + "\n"
    )
    if "--check" in sys.argv[1:]:
        if TARGET.read_text(encoding="utf-8") == text_now:
            return 0
        print(f"{TARGET.name} is not what make_messages.py makes")
        return 1
    TARGET.write_text(text_now, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
