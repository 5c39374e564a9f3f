from __future__ import annotations

import dataclasses
import itertools
import sys
import traceback
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import DigestUnsupported, InvalidArgument
from kvwire.keys import MAX_FIELD_BYTES, Namespace, canonical_encoding, root, salt_digest

TEXT_FIELDS = ["model", "revision", "kv_dtype", "adapter", "adapter_revision", "salt"]
OPTIONAL_FIELDS = ["revision", "kv_dtype", "layout_fingerprint", "adapter", "adapter_revision", "salt"]
LEGAL_TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=40)
NAMESPACES = st.builds(
    Namespace,
    model=LEGAL_TEXT.filter(bool),
    revision=LEGAL_TEXT,
    kv_dtype=LEGAL_TEXT,
    layout_fingerprint=st.binary(max_size=40),
    adapter=LEGAL_TEXT,
    adapter_revision=LEGAL_TEXT,
    salt=LEGAL_TEXT,
)


def with_field(name, value):
    return dataclasses.replace(Namespace("m"), **{name: value})


def decode(encoding):
    fields = {}
    while encoding:
        number, length = (int.from_bytes(encoding[i : i + 4], "little") for i in (0, 4))
        fields[number] = encoding[8 : 8 + length]
        encoding = encoding[8 + length :]
    return fields


@given(NAMESPACES, st.integers(1, 2**32 - 1))
def test_the_encoding_can_be_read_back_so_that_no_two_identities_share_one(namespace, chunk_size):
    fields = decode(canonical_encoding(namespace, chunk_size))
    assert list(fields) == sorted(fields)
    assert all(fields.values())
    numbers = {name: number for number, name in enumerate(["model", *OPTIONAL_FIELDS], start=1)}
    for name, number in numbers.items():
        value = getattr(namespace, name)
        assert fields.get(number, b"") == (value if isinstance(value, bytes) else value.encode())
    assert (fields[8], fields[9]) == (chunk_size.to_bytes(4, "little"), b"sha256")


@given(NAMESPACES, NAMESPACES)
def test_equal_roots_mean_equal_namespaces(left, right):
    assert (root(left, 256) == root(right, 256)) == (left == right)


@pytest.mark.parametrize("name", OPTIONAL_FIELDS)
def test_every_field_changes_the_root(name):
    value = b"x" if name == "layout_fingerprint" else "x"
    assert root(with_field(name, value), 256) != root(Namespace("m"), 256)


def test_the_chunk_size_changes_the_root():
    assert root(Namespace("m"), 256) != root(Namespace("m"), 512)


@pytest.mark.parametrize("chunk_size", [0, -1, 2**32])
def test_a_chunk_size_outside_uint32_is_refused(chunk_size):
    with pytest.raises(InvalidArgument, match="chunk_size"):
        root(Namespace("m"), chunk_size)


def test_an_unknown_digest_function_is_refused():
    with pytest.raises(DigestUnsupported, match="sha256"):
        canonical_encoding(Namespace("m"), 256, "md5")


def test_a_model_is_required():
    with pytest.raises(InvalidArgument, match="model"):
        Namespace("").validate()


@pytest.mark.parametrize("name", TEXT_FIELDS)
def test_limits_count_bytes_of_utf8(name):
    with_field(name, "ä" * (MAX_FIELD_BYTES // 2)).validate()
    with pytest.raises(InvalidArgument) as caught:
        with_field(name, "ä" * (MAX_FIELD_BYTES // 2) + "a").validate()
    assert caught.value.metadata["field"] == name


def test_the_fingerprint_is_limited_and_may_hold_any_bytes():
    with_field("layout_fingerprint", bytes(range(192, 256))).validate()
    with pytest.raises(InvalidArgument, match="layout_fingerprint"):
        with_field("layout_fingerprint", b"x" * 65).validate()


def test_control_characters_are_exactly_unicodes_category_cc():
    refused = []
    for code in range(sys.maxunicode + 1):
        try:
            Namespace(chr(code)).validate()
        except InvalidArgument:
            refused.append(code)
    assert refused == [c for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)) in {"Cc", "Cs"}]


@pytest.mark.parametrize("name", TEXT_FIELDS)
@pytest.mark.parametrize("character", ["\n", "\0", "\x7f", "\x85", "\ud800"])
def test_illegal_text_names_its_field(name, character):
    with pytest.raises(InvalidArgument) as caught:
        root(with_field(name, f"a{character}b"), 256)
    assert caught.value.metadata["field"] == name


RED = Namespace("m", adapter="red")
RED_SALT = Namespace("m", salt="red")
RED_RELOADED = Namespace("m", adapter="red", adapter_revision="2")


def test_bl08_adapter_salt_neither_and_reloaded_adapter_are_four_identities():
    roots = [root(namespace, 256) for namespace in (RED, RED_SALT, Namespace("m"), RED_RELOADED)]
    assert len(set(roots)) == 4


def test_bl08_without_adapter_and_salt_the_root_is_that_from_before_the_fields_existed():
    # Field numbers 1, 8 and 9 alone: written out by hand, so that a new field cannot creep in.
    before = bytes.fromhex("01000000010000006d0800000004000000000100000900000006000000736861323536")
    assert canonical_encoding(Namespace("m"), 256) == before
    assert canonical_encoding(Namespace("m", adapter="", salt=""), 256) == before


@given(
    st.text("ab", max_size=4), st.text("ab", max_size=4), st.text("ab", max_size=4), st.text("ab", max_size=4)
)
def test_bl08_text_cannot_move_from_one_field_to_another(adapter, salt, other_adapter, other_salt):
    one = Namespace("m", adapter=adapter, salt=salt)
    other = Namespace("m", adapter=other_adapter, salt=other_salt)
    assert (root(one, 16) == root(other, 16)) == ((adapter, salt) == (other_adapter, other_salt))


def test_bl50_long_but_legal_values_give_a_name_of_fixed_length():
    namespace = Namespace("org/" + "m" * 136, salt="s" * 128)
    assert len(root(namespace, 256).hex()) == 64


def test_bl50_different_identities_never_share_a_name():
    models = ["a/b", "a-SEP-b", "a_b", "a%2Fb", "A/B", "a//b", "../a/b", "a\\b"]
    salts = ["", "@", "/", "..", "../../x", "a@b", "é", "e\u0301", "秘密"]
    roots = {root(Namespace(m, salt=s), 256) for m, s in itertools.product(models, salts)}
    assert len(roots) == len(models) * len(salts)


@pytest.mark.parametrize("salt", ["a\nb", "\0", "\x1b[2J", "\x9f", "\udcff"])
def test_bl50_illegal_characters_are_refused_at_the_edge(salt):
    for use in (
        Namespace("m", salt=salt).validate,
        lambda: root(Namespace("m", salt=salt), 256),
        lambda: salt_digest(salt),
    ):
        with pytest.raises(InvalidArgument, match="salt"):
            use()


def test_bl55_tenants_have_roots_of_their_own_and_come_back_to_them():
    def tenant(salt):
        return root(Namespace("m", salt=salt), 256)

    assert len({tenant("t1"), tenant("t2"), tenant("")}) == 3
    assert tenant("t1") == tenant("t1")


def test_bl55_a_salt_never_shows():
    salt = "s3cret-tenant"
    namespace = Namespace("m", adapter="a", salt=salt)
    for text in (repr(namespace), str(namespace), f"{namespace}", f"{namespace!r:>10}", salt_digest(salt)):
        assert salt not in text


@pytest.mark.parametrize("salt", ["s3cret\n", "s3cret\ud800", "s3cret" * 100])
def test_bl55_an_error_never_quotes_a_salt(salt):
    with pytest.raises(InvalidArgument) as caught:
        root(Namespace("m", salt=salt), 256)
    error = caught.value
    assert "s3cret" not in "".join(traceback.format_exception(error)) + repr(error) + str(error.metadata)
    assert error.__context__ is None


@given(LEGAL_TEXT)
def test_bl55_quotas_know_a_tenant_by_16_hex_digits(salt):
    digest = salt_digest(salt)
    assert len(digest) == (16 if salt else 0)
    assert set(digest) <= set("0123456789abcdef")
    assert not salt or not root(Namespace("m", salt=salt), 256).hex().startswith(digest)
