"""The checked-in vectors, the script that makes them, the library and the Node example all agree."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvwire.errors import InvalidArgument, TokensInvalid
from kvwire.keys import (
    DIGEST_FUNCTION,
    ChunkHasher,
    ExtraInput,
    Namespace,
    canonical_encoding,
    chunk_keys,
    keys_from_block_hashes,
    pack_tokens,
    root,
    salt_digest,
    striding_block_hashes,
)

REPOSITORY = Path(__file__).parents[3]
TESTDATA = REPOSITORY / "proto/testdata"
VECTORS = json.loads((TESTDATA / "chunk_keys.json").read_text())


def name_of(vector):
    return vector["name"]


def namespace_of(fields):
    fingerprint = bytes.fromhex(fields.get("layout_fingerprint", ""))
    return Namespace(**{"model": "", **fields, "layout_fingerprint": fingerprint})


def inputs_of(vector):
    return [ExtraInput(bytes.fromhex(i["digest"]), i["start"], i["length"]) for i in vector["inputs"]]


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=name_of)
def test_chain(vector):
    namespace, chunk_size = namespace_of(vector["namespace"]), vector["chunk_size"]
    start = root(namespace, chunk_size)
    keys = chunk_keys(start, vector["tokens"], chunk_size, inputs_of(vector))
    assert (
        canonical_encoding(namespace, chunk_size, VECTORS["digest_function"]).hex()
        == vector["canonical_encoding"]
    )
    assert start.hex() == vector["root"]
    assert [key.hex() for key in keys] == vector["keys"]


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=name_of)
def test_chain_one_token_at_a_time(vector):
    hasher = ChunkHasher(bytes.fromhex(vector["root"]), vector["chunk_size"])
    hasher.append([], inputs_of(vector))
    for token in vector["tokens"]:
        hasher.append([token])
    assert [key.hex() for key in hasher.keys] == vector["keys"]


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=name_of)
def test_extra_bytes(vector):
    size = vector["chunk_size"]
    inputs = sorted(inputs_of(vector), key=lambda i: (i.start, i.digest, i.length))
    for chunk, expected in enumerate(vector["extra"]):
        begin, end = chunk * size, (chunk + 1) * size
        overlapping = [i for i in inputs if i.start < end and i.start + i.length > begin]
        assert b"".join(i.encode(begin) for i in overlapping).hex() == expected


@pytest.mark.parametrize("vector", VECTORS["block_hashes"], ids=name_of)
def test_block_hashes(vector):
    hashes = [bytes.fromhex(block) for block in vector["block_hashes"]]
    strided = list(striding_block_hashes(hashes, vector["blocks_in_chunk"]))
    assert [block.hex() for block in strided] == vector["strided"]
    assert [key.hex() for key in keys_from_block_hashes(bytes.fromhex(vector["root"]), strided)] == vector[
        "keys"
    ]


@pytest.mark.parametrize("vector", VECTORS["salt_digests"], ids=str)
def test_salt_digests(vector):
    assert salt_digest(vector["salt"]) == vector["digest"]


@pytest.mark.parametrize("vector", VECTORS["refused_namespaces"], ids=lambda vector: vector["field"])
def test_refused_namespaces(vector):
    with pytest.raises(InvalidArgument) as caught:
        namespace_of(vector["namespace"]).validate()
    assert caught.value.metadata["field"] == vector["field"]


@pytest.mark.parametrize("tokens", VECTORS["refused_tokens"], ids=str)
def test_refused_tokens(tokens):
    with pytest.raises(TokensInvalid):
        pack_tokens(tokens)


def test_the_page_shows_the_bytes_of_its_example():
    page = (REPOSITORY / "docs/keys.md").read_text()
    example = next(vector for vector in VECTORS["chains"] if "docs/keys.md" in vector["name"])
    shown = [
        example["canonical_encoding"],
        example["root"],
        *filter(None, example["extra"]),
        *example["keys"],
    ]
    assert [value for value in shown if value not in page] == []


def test_the_digest_function_is_the_vectors():
    assert VECTORS["digest_function"] == DIGEST_FUNCTION


def test_the_files_are_what_the_script_makes():
    subprocess.run([sys.executable, TESTDATA / "make_vectors.py", "--check"], check=True)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_node_example_computes_the_same_keys():
    script = REPOSITORY / "examples/node/check_keys.mjs"
    result = subprocess.run(["node", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert f"{len(VECTORS['chains'])} chains" in result.stdout
