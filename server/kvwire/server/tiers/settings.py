"""The setting `--l2`: where a lower tier lies, and how it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from kvwire.cli import units
from kvwire.errors import ConfigError
from kvwire.server.tiers.backends import OPTIONS, SCHEMES
from kvwire.server.tiers.backends.base import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from urllib.parse import SplitResult

KNOWN: Final = ("size", "store", "fetch", "name", "endpoint", "region", "timeout")
STORE: Final = ("all", "evict")
DEFAULT_NAMES: Final = {
    "file": "disk",
    "memory": "memory",
    "s3": "s3",
    "gs": "gcs",
    "az": "azure",
    "redis": "redis",
    "valkey": "valkey",
}
DEFAULT_MEMORY: Final = 1 << 30
MIN_SIZE: Final = 1 << 20
MAX_NAME: Final = 64
_SECRETS: Final = ("password", "passwd", "secret", "token", "key", "credential", "signature", "sas")


@dataclass(frozen=True, slots=True)
class TierSettings:
    """`store`: "all" (what is stored in memory) or "evict" (what leaves it). `fetch`: lookups ask it."""

    name: str
    place: Place
    size: int
    store: str = "all"
    fetch: bool = True

    @property
    def location(self) -> str:
        """For people; without credentials, as these are never part of it."""
        path = f"/{self.place.prefix}" if self.place.prefix else ""
        at = f" at {self.place.endpoint}" if self.place.endpoint else ""
        return f"{self.place.scheme}://{self.place.location}{path}{at}"


def read_tiers(urls: Sequence[str]) -> tuple[TierSettings, ...]:
    """Raises ConfigError, which never repeats what could be a credential."""
    tiers = tuple(read_tier(url) for url in urls)
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise _bad(f"two stores are named {name!r}: give one of them another name, with name=")
    return tiers


def read_tier(url: str) -> TierSettings:
    parts = _split(url)
    scheme = parts.scheme.lower()
    if scheme not in SCHEMES:
        raise _bad(f"{scheme or url.partition('?')[0]!r} is none of: {', '.join(f'{s}://' for s in SCHEMES)}")
    query = _query(parts.query, scheme)
    location, prefix = _where(scheme, parts)
    take = query.pop
    place = Place(
        scheme,
        location,
        prefix,
        endpoint=take("endpoint", ""),
        region=take("region", ""),
        timeout=_read(take("timeout", "10s"), "timeout", units.parse_duration),
        options={option: take(option) for option in sorted(OPTIONS[scheme] & query.keys())},
    )
    _no_credentials(place.endpoint)
    if place.timeout <= 0:
        raise _bad("timeout= must be above 0")
    name = take("name", DEFAULT_NAMES[scheme])
    settings = TierSettings(
        name=_checked_name(name),
        place=place,
        size=_size(take("size", ""), scheme),
        store=_one_of(take("store", "all"), "store", STORE),
        fetch=_one_of(take("fetch", "yes"), "fetch", ("yes", "no")) == "yes",
    )
    if query:
        known = ", ".join((*KNOWN, *sorted(OPTIONS[scheme])))
        raise _bad(f"{scheme}:// does not know {', '.join(sorted(query))}; it knows {known}")
    return settings


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        secret = parts.username is not None or parts.password is not None
        parts.port  # noqa: B018 - raises for a bad one
    except ValueError:
        raise _bad("is not a URL") from None
    if secret:
        raise _credentials()
    if parts.fragment:
        raise _bad("has a part behind #, which says nothing")
    return parts


def _no_credentials(endpoint: str) -> None:
    if endpoint and (_split(endpoint).scheme not in ("http", "https") or urlsplit(endpoint).query):
        raise _bad("endpoint= is written http://HOST:PORT or https://HOST")


def _where(scheme: str, parts: SplitResult) -> tuple[str, str]:
    """Location and prefix."""
    path = unquote(parts.path)
    if scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise _bad(f"a folder is written file:///{parts.netloc}{path}, with three slashes")
        if not path.strip("/") or "\0" in path:
            raise _bad("a folder is written file:///var/kv")
        return path.rstrip("/"), ""
    prefix = path.strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise _bad("the path has an empty part, or one of dots")
    if scheme != "memory" and not parts.netloc:
        what = "HOST:PORT" if scheme in ("redis", "valkey") else "BUCKET/PREFIX"
        raise _bad(f"is written {scheme}://{what}")
    return parts.netloc, prefix


def _query(text: str, scheme: str) -> dict[str, str]:
    query: dict[str, str] = {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
    except ValueError:
        raise _bad(f"what follows {scheme}://...? is written NAME=VALUE&NAME=VALUE") from None
    for name, value in pairs:
        if any(word in name.lower() for word in _SECRETS):
            raise _credentials()
        if name in query:
            raise _bad(f"says {name}= twice")
        query[name] = value
    return query


def _size(text: str, scheme: str) -> int:
    if not text and scheme == "memory":
        return DEFAULT_MEMORY
    if not text:
        raise _bad("needs a capacity: size=100GiB")
    size = _read(text, "size", units.parse_size)
    if size < MIN_SIZE:
        raise _bad("size= must be at least 1MiB")
    return int(size)


def _read(text: str, name: str, read: Callable[[str], float]) -> float:
    try:
        return read(text)
    except ValueError as error:
        raise _bad(f"{name}={text!r} {error}") from None


def _one_of(text: str, name: str, known: Sequence[str]) -> str:
    if text not in known:
        raise _bad(f"{name}= must be {' or '.join(known)}")
    return text


def _checked_name(name: str) -> str:
    good = name.isascii() and all(letter.isalnum() or letter in "-_." for letter in name)
    if not good or not 1 <= len(name) <= MAX_NAME:
        raise _bad(f"name= must be 1 to {MAX_NAME} letters, digits, dots, dashes and underscores")
    return name


def _credentials() -> ConfigError:
    return _bad("a URL must not hold credentials: they come from the environment (docs/tiers.md)")


def _bad(problem: str) -> ConfigError:
    return ConfigError(f"--l2 {problem}.", setting="l2")
