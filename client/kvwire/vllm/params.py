"""What one request may say in its `kv_transfer_params`, and what it is told back. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvwire.vllm.tracker import Account

PREFIX: Final = "kvwire."
ANSWER: Final = "kvwire"
"""The key of the statistics in a response. It lacks the prefix: proxies send them on with a next request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """Each field `name` is the key `kvwire.name`."""

    load: bool = field(default=True, metadata={"help": "Load this prompt's KV from the server."})
    store: bool = field(default=True, metadata={"help": "Store this request's KV in the server."})
    save_decode: bool = field(
        default=False,
        metadata={
            "help": "Also store chunks that the model generates. Default: the setting `kvwire.save_decode`."
        },
    )
    max_hit_tokens: int = field(
        default=0,
        metadata={
            "help": "Load no more tokens of the prompt than that, in whole chunks. 0: all that are there."
        },
    )
    stats: bool = field(default=False, metadata={"help": "Put this request's statistics into its response."})


@dataclass(frozen=True, slots=True)
class Parsed:
    """`problems` names each key that was ignored and says why. A value is not quoted: a tenant chose it."""

    params: RequestParams
    problems: tuple[str, ...] = ()


def request_params(given: Any, defaults: RequestParams) -> Parsed:
    """The keys with the prefix; others belong to somebody else. Never raises: what is wrong is ignored."""
    values = {each.name: getattr(defaults, each.name) for each in fields(RequestParams)}
    problems: list[str] = []
    for key, value in _items(given):
        if not isinstance(key, str) or not key.startswith(PREFIX):
            continue
        name = key.removeprefix(PREFIX)
        problem = _problem(name, value, values)
        if problem:
            problems.append(f"{key[:64]!r} {problem}")
        else:
            values[name] = value
    return Parsed(RequestParams(**values), tuple(problems))


def _items(given: Any) -> list[tuple[Any, Any]]:
    return list(given.items()) if isinstance(given, dict) else []


def _problem(name: str, value: Any, known: Mapping[str, Any]) -> str:
    if name not in known:
        near = get_close_matches(name, known, n=1)
        told = f"did you mean {PREFIX}{near[0]}?" if near else f"known are {_known(known)}"
        return f"is unknown: {told}"
    wanted = type(known[name])
    if type(value) is not wanted:
        return f"is of type {type(value).__name__} and must be of type {wanted.__name__}"
    if wanted is int and value < 0:
        return "is negative"
    return ""


def _known(known: Mapping[str, Any]) -> str:
    return ", ".join(PREFIX + name for name in known)


def answer(account: Account, prompt_tokens: int) -> dict[str, Any]:
    """The statistics of one request as its response carries them."""
    return {
        ANSWER: {
            "prompt_tokens": prompt_tokens,
            "engine_cached_tokens": account.local,
            "found_tokens": account.hit,
            "loaded_tokens": account.loaded,
            "stored_tokens": account.stored,
            "reason": account.reason,
        }
    }
