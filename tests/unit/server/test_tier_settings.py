from __future__ import annotations

import pytest

from kvwire.cli.settings import load_settings
from kvwire.errors import ConfigError
from kvwire.server.config import ServerConfig
from kvwire.server.tiers.settings import read_tier, read_tiers

GIB = 1 << 30


def test_a_folder() -> None:
    tier = read_tier("file:///var/kv?size=100GiB")
    assert (tier.name, tier.size, tier.store, tier.fetch) == ("disk", 100 * GIB, "all", True)
    assert (tier.place.scheme, tier.place.location, tier.place.prefix) == ("file", "/var/kv", "")
    assert tier.location == "file:///var/kv"


def test_an_object_store() -> None:
    tier = read_tier(
        "s3://bucket/some/prefix/?size=1TiB&store=evict&fetch=no&name=cold&endpoint=http://h:9&region=eu&timeout=2s"
    )
    assert (tier.name, tier.size, tier.store, tier.fetch) == ("cold", 1024 * GIB, "evict", False)
    place = tier.place
    assert (place.location, place.prefix, place.endpoint) == ("bucket", "some/prefix", "http://h:9")
    assert (place.region, place.timeout) == ("eu", 2.0)
    assert tier.location == "s3://bucket/some/prefix at http://h:9"


@pytest.mark.parametrize(
    ("url", "name", "location"),
    [
        ("memory://", "memory", ""),
        ("gs://b?size=1GiB", "gcs", "b"),
        ("az://container/p?size=1GiB", "azure", "container"),
        ("redis://host:6379?size=1GiB", "redis", "host:6379"),
        ("valkey://[::1]:6379?size=1GiB", "valkey", "[::1]:6379"),
    ],
)
def test_the_others(url: str, name: str, location: str) -> None:
    tier = read_tier(url)
    assert (tier.name, tier.place.location, tier.size) == (name, location, GIB)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("/var/kv?size=1GiB", "is none of: file://"),
        ("ftp://host?size=1GiB", "'ftp' is none of"),
        ("file:///var/kv", "needs a capacity: size=100GiB"),
        ("file:///var/kv?size=12", "at least 1MiB"),
        ("file:///var/kv?size=lots", "size='lots' is not a size"),
        ("file://var/kv?size=1GiB", "with three slashes"),
        ("file:///?size=1GiB", "is written file:///var/kv"),
        ("file:///v%00v?size=1GiB", "is written file:///var/kv"),
        ("s3:///prefix?size=1GiB", "is written s3://BUCKET"),
        ("s3://b/../c?size=1GiB", "one of dots"),
        ("redis://?size=1GiB", "is written redis://HOST:PORT"),
        ("redis://h:99999?size=1GiB", "is not a URL"),
        ("file:///v?size=1GiB&store=some", "store= must be all or evict"),
        ("file:///v?size=1GiB&fetch=maybe", "fetch= must be yes or no"),
        ("file:///v?size=1GiB&name=a/b", "name= must be"),
        ("file:///v?size=1GiB&colour=red", "does not know colour"),
        ("file:///v?size=1GiB&size=2GiB", "says size= twice"),
        ("file:///v?size", "NAME=VALUE"),
        ("file:///v?size=1GiB&timeout=0s", "timeout= must be above 0"),
        ("s3://b?size=1GiB&endpoint=host:9", "endpoint= is written"),
        ("file:///v?size=1GiB#x", "behind #"),
    ],
)
def test_a_bad_url_says_what_is_wrong(url: str, why: str) -> None:
    with pytest.raises(ConfigError) as failed:
        read_tier(url)
    assert why in str(failed.value)
    assert failed.value.metadata["setting"] == "l2"


@pytest.mark.parametrize(
    "url",
    [
        "s3://id:hunter2@bucket?size=1GiB",
        "redis://:hunter2@host:1?size=1GiB",
        "s3://b?size=1GiB&secret_access_key=hunter2",
        "az://c?size=1GiB&sas_token=hunter2",
        "s3://b?size=1GiB&endpoint=http://id:hunter2@h:9",
        "redis://host:hunter2@x:y",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as failed:
        load_settings(ServerConfig, {"l2": (url,)}, {})
    assert "hunter2" not in str(failed.value)
    assert "hunter2" not in str(failed.value.metadata)


def test_names_are_unique() -> None:
    with pytest.raises(ConfigError, match="two stores are named 'disk'"):
        read_tiers(["file:///a?size=1GiB", "file:///b?size=1GiB"])
    tiers = read_tiers(["file:///a?size=1GiB", "file:///b?size=1GiB&name=slow", "memory://"])
    assert [tier.name for tier in tiers] == ["disk", "slow", "memory"]
