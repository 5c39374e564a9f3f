"""Writes chunk_keys.json and alignment.json; with --check, fails if the files beside it differ.

Straight-line code that shares nothing with the library, so that the two check each other.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FIELDS = ("model", "revision", "kv_dtype", "layout_fingerprint", "adapter", "adapter_revision", "salt")
# The two differ only above their lowest 16 bits.
IMAGE_1 = "00112233445566778899aabbccddeeff" + "00" * 14 + "0001"
IMAGE_2 = "ffeeddccbbaa99887766554433221100" + "00" * 14 + "0001"


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def encoding(fields: dict[str, str], chunk_size: int) -> bytes:
    out = b""
    for number, name in enumerate(FIELDS, start=1):
        value = fields.get(name, "")
        raw = bytes.fromhex(value) if name == "layout_fingerprint" else value.encode("utf-8")
        if raw:
            out += u32(number) + u32(len(raw)) + raw
    out += u32(8) + u32(4) + u32(chunk_size)
    out += u32(9) + u32(6) + b"sha256"
    return out


def root_of(fields: dict[str, str], chunk_size: int) -> bytes:
    return sha(b"kvwire/chunk/v1" + encoding(fields, chunk_size))


def extra_of(inputs: list[dict[str, Any]], chunk: int, chunk_size: int) -> bytes:
    begin, end = chunk * chunk_size, (chunk + 1) * chunk_size
    out = b""
    for item in sorted(inputs, key=lambda i: (i["start"], bytes.fromhex(i["digest"]), i["length"])):
        if item["start"] < end and item["start"] + item["length"] > begin:
            digest = bytes.fromhex(item["digest"])
            out += u32(len(digest)) + digest
            out += (item["start"] - begin).to_bytes(8, "little", signed=True)
            out += item["length"].to_bytes(8, "little")
    return out


def chain(
    name: str, fields: dict[str, str], chunk_size: int, tokens: list[int], inputs: list[dict[str, Any]]
) -> dict[str, Any]:
    key = root = root_of(fields, chunk_size)
    extras, keys = [], []
    for chunk in range(len(tokens) // chunk_size):
        packed = b"".join(u32(token) for token in tokens[chunk * chunk_size : (chunk + 1) * chunk_size])
        extra = extra_of(inputs, chunk, chunk_size)
        key = sha(key + packed + extra)
        extras.append(extra.hex())
        keys.append(key.hex())
    return {
        "name": name,
        "namespace": fields,
        "chunk_size": chunk_size,
        "canonical_encoding": encoding(fields, chunk_size).hex(),
        "root": root.hex(),
        "tokens": tokens,
        "inputs": inputs,
        "extra": extras,
        "keys": keys,
    }


def image(digest: str, start: int, length: int) -> dict[str, Any]:
    return {"digest": digest, "start": start, "length": length}


def chains() -> list[dict[str, Any]]:
    count = list(range(600))
    placeholders = [99 if 260 <= position <= 400 else position for position in range(600)]
    full = {
        "model": "meta-llama/Llama-3.1-8B",
        "revision": "0e9e39f249a16976918f6564b8830bc894c89659",
        "kv_dtype": "bfloat16",
        "layout_fingerprint": "a1b2c3d4e5f60718293a4b5c6d7e8f90",
        "adapter": "sql-lora",
        "adapter_revision": "2",
        "salt": "tenant-7",
    }
    red, red_salt = {"model": "m", "adapter": "red"}, {"model": "m", "salt": "red"}
    first, shifted, second = image(IMAGE_1, 260, 141), image(IMAGE_1, 261, 140), image(IMAGE_2, 260, 141)
    several = [
        image("02", 9, 3),
        image("01" * 8, 2, 9),
        image("03", 9, 3),
        image("02", 9, 2),
        image("04", 3, 2**40),
    ]
    return [
        chain("the example of docs/keys.md", {"model": "m"}, 4, count[:10], [image("aabb", 6, 4)]),
        chain("model only", {"model": "m"}, 256, count, []),
        chain("every field", full, 256, count, []),
        chain("another chunk size", {"model": "m"}, 544, count, []),
        chain("no whole chunk", {"model": "m"}, 256, count[:255], []),
        chain("a partial chunk has no key", {"model": "m"}, 4, [7, 7, 7, 7, 8], []),
        chain(
            "chunks of one token, the limits of uint32", {"model": "m"}, 1, [0, 1, 255, 256, 4294967295], []
        ),
        chain("text beyond ASCII", {"model": "modèle/模型-😀", "salt": "a@b/../c d"}, 4, count[:8], []),
        chain("adapter red", red, 256, count, []),
        chain("salt red", red_salt, 256, count, []),
        chain("adapter red, other weights", {**red, "adapter_revision": "2"}, 256, count, []),
        chain("adapter red, salt red", {**red, **red_salt}, 256, count, []),
        chain(
            "adapter r, revision ed", {"model": "m", "adapter": "r", "adapter_revision": "ed"}, 256, count, []
        ),
        chain("image 1", {"model": "m"}, 256, placeholders, [first]),
        chain("image 2 on the same tokens", {"model": "m"}, 256, placeholders, [second]),
        chain("image 1 one token later", {"model": "m"}, 256, placeholders, [shifted]),
        chain(
            "images that fill their chunks",
            {"model": "m"},
            4,
            count[:16],
            [image(IMAGE_1, 4, 4), image(IMAGE_2, 8, 4)],
        ),
        chain("image over three chunks", {"model": "m"}, 4, count[:16], [image(IMAGE_1, 3, 6)]),
        chain("several inputs, sorted by start, digest, length", {"model": "m"}, 8, count[:24], several),
    ]


def block_hashes() -> list[dict[str, Any]]:
    hashes = [sha(u32(number)) for number in range(7)]
    root = root_of({"model": "m"}, 48)
    result = []
    for name, blocks, every in (
        ("32-byte hashes, 3 blocks per chunk", hashes, 3),
        ("other lengths", [b"\1", b"\1\0"], 1),
    ):
        strided = blocks[every - 1 :: every]
        result.append(
            {
                "name": name,
                "root": root.hex(),
                "blocks_in_chunk": every,
                "block_hashes": [block.hex() for block in blocks],
                "strided": [block.hex() for block in strided],
                "keys": [sha(b"kvwire/blockhash/v1" + root + u32(len(h)) + h).hex() for h in strided],
            }
        )
    return result


def salts() -> list[dict[str, str]]:
    digests = [{"salt": "", "digest": ""}]
    for salt in ("red", "tenant-7", "mandant-ä"):
        raw = salt.encode("utf-8")
        digests.append({"salt": salt, "digest": sha(b"kvwire/salt/v1" + u32(len(raw)) + raw).hex()[:16]})
    return digests


def refused() -> list[dict[str, Any]]:
    cases = [
        ({}, "model"),
        ({"model": "m" * 513}, "model"),
        ({"model": "m", "revision": "a\nb"}, "revision"),
        ({"model": "m", "kv_dtype": "\t"}, "kv_dtype"),
        ({"model": "m", "layout_fingerprint": "00" * 65}, "layout_fingerprint"),
        ({"model": "m", "adapter": "a\u0085"}, "adapter"),
        ({"model": "m", "adapter_revision": "\u007f"}, "adapter_revision"),
        ({"model": "m", "salt": "a\u0000b"}, "salt"),
        ({"model": "m", "salt": "ä" * 257}, "salt"),
    ]
    return [{"namespace": fields, "field": field} for fields, field in cases]


def alignment() -> dict[str, Any]:
    def lcm(spans: list[int]) -> int:
        candidate = max(spans)
        while any(candidate % span for span in spans):
            candidate += max(spans)
        return candidate

    def rounded(minimum: int, needed: int) -> int:
        size = needed
        while size < minimum:
            size += needed
        return size

    spans = (
        [256],
        [16],
        [32, 48],
        [48, 80],
        [96, 0, 96],
        [544, 16],
        [0, 1, 7],
        [16, 1056],
        [256, 768, 0, 1024],
    )
    pairs = (
        (256, 256), (544, 256), (544, 600), (96, 256), (272, 256), (272, 300), (256, 257),
        (7, 1), (400, 1024), (1, 255), (240, 256), (65536, 1), (1, 65536), (32768, 32769),
    )  # fmt: skip
    too_large = ((65537, 1), (1, 65537), (32769, 32770), (65521 * 65519 * 65497, 256))
    return {
        "required_alignment": [{"spans": s, "alignment": lcm([n for n in s if n])} for s in spans],
        "required_alignment_invalid": [[], [0], [0, 0], [256, -16]],
        "final_chunk_size": [{"minimum": m, "alignment": a, "final": rounded(m, a)} for a, m in pairs],
        "alignment_too_large": [{"minimum": m, "alignment": a} for a, m in too_large],
        "alignment_invalid": [{"minimum": 256, "alignment": a} for a in (0, -1, -256)],
        "maximum": 65536,
    }


def files() -> dict[str, Any]:
    keys = {
        "format": "docs/keys.md explains every value; byte strings are hexadecimal, tokens are numbers.",
        "digest_function": "sha256",
        "chains": chains(),
        "block_hashes": block_hashes(),
        "salt_digests": salts(),
        "refused_namespaces": refused(),
        "refused_tokens": [[-1], [0, 4294967296], [1, 2, True], [0.5], [1, None]],
    }
    return {"chunk_keys.json": keys, "alignment.json": alignment()}


def render(value: Any) -> str:
    """JSON with one line per element of the outer lists, so that a changed vector is one changed line."""
    parts = []
    for name, member in value.items():
        if isinstance(member, list):
            lines = ",\n".join("    " + json.dumps(element) for element in member)
            parts.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
        else:
            parts.append(f"  {json.dumps(name)}: {json.dumps(member)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(arguments: list[str]) -> int:
    stale = [name for name, value in files().items() if not is_current(HERE / name, render(value))]
    if "--check" not in arguments:
        for name in stale:
            (HERE / name).write_text(render(files()[name]))
        return 0
    for name in stale:
        print(
            f"{name} is not what make_vectors.py makes. A changed key makes every stored chunk unreachable."
        )
    return 1 if stale else 0


def is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
