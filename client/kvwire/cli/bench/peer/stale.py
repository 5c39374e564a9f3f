"""What asking costs while a share of what the directory says is not true any more.

Server a evicts whole prompts, as an LRU cache does with those that nobody uses, and the coordinator is kept
from learning of it. Then server b is asked for all of them once, in no order.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, TypeVar

from kvwire.cli.bench import stats
from kvwire.cli.bench.peer.engines import A, B, Engines
from kvwire.cli.bench.peer.fleet import Counts
from kvwire.cli.bench.peer.small import Small, small
from kvwire.cli.bench.processes import BenchError
from kvwire.keys import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.cli.bench.peer.fleet import Fleet
    from kvwire.cli.bench.peer.plan import Plan
    from kvwire.v1.namespace_pb2 import Namespace

P = TypeVar("P")


def lookups(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    """Lookups by a client that has no engine, and as a measure those of prompts that b has, or nobody."""
    with small(plan, plan.stale_lookups) as bench:
        progress(f"stale placements: storing {plan.stale_lookups} prompts")
        bench.running.relay.withhold("a")
        prompts = bench.stored(plan.stale_lookups)
        _warm_up(bench)
        nowhere = [bench.look_up(bench.prompt())[0] for _ in prompts]
        local = _local(bench, prompts)
        found = by_share(
            plan.shares,
            prompts,
            evict=lambda prompt: _evicted(bench.running, bench.namespace, prompt.tokens, bench.chunks),
            ask=lambda prompt, gone: _asked(bench, prompt, gone),
            running=bench.running,
            progress=lambda what: progress(f"{what}, lookups"),
        )
    return {
        "prompt_bytes": bench.size_bytes,
        "prompt_chunks": bench.chunks,
        "nowhere_ms": _marks(nowhere),
        "local_ms": _marks(local),
        "shares": found,
    }


def _local(bench: Small, prompts: Sequence[Any]) -> list[float]:
    """Lookups of what b has in memory by then."""
    for each in prompts:
        bench.look_up(each)
    seconds = [bench.look_up(each)[0] for each in prompts]
    bench.running.emptied(bench.running.b)
    return seconds


def _warm_up(bench: Small) -> None:
    for each in bench.stored(3):
        bench.look_up(each)
        _evicted(bench.running, bench.namespace, each.tokens, bench.chunks)
    bench.running.emptied(bench.running.b)


def _asked(bench: Small, prompt: Any, gone: bool) -> float:
    seconds, chunks = bench.look_up(prompt)
    if chunks != (0 if gone else bench.chunks):
        told = f"{chunks} chunks were found of a prompt that was {'evicted' if gone else 'there'}"
        raise BenchError(f"{told}: {bench.running.b.sharing()}")
    return seconds


def first_tokens(bench: Engines) -> list[dict[str, Any]]:
    """Times to the first token at engine b. What is stale is computed there."""
    plan = bench.plan
    bench.running.relay.withhold("a")
    bench.running.emptied(bench.running.b)
    prompts = [bench.prompt(plan.prompt_tokens) for _ in range(plan.stale_prompts)]
    for number, each in enumerate(prompts):
        bench.progress(f"stale placements: computing prompt {number + 1} of {len(prompts)}")
        bench.answer(A, each)
    for each in prompts:
        bench.located(each)
    space = bench.running.a.status().namespaces[0].namespace
    chunks = plan.prompt_tokens // plan.chunk_size

    def ask(prompt: list[int], gone: bool) -> float:
        answer = bench.answer(B, prompt)
        if answer["cached_tokens"] != (0 if gone else bench.shared(plan.prompt_tokens)):
            raise BenchError(f"{answer['cached_tokens']} tokens were reused: {bench.running.b.sharing()}")
        return float(answer["first_token_s"])

    return by_share(
        plan.shares,
        prompts,
        evict=lambda prompt: _evicted(bench.running, space, pack_tokens(prompt), chunks),
        ask=ask,
        running=bench.running,
        progress=lambda what: bench.progress(f"{what}, time to first token"),
    )


def _evicted(running: Fleet, namespace: Namespace, tokens: bytes, chunks: int) -> None:
    running.a.settle()
    evicted = running.a.evict(namespace, tokens)
    if evicted != chunks:
        raise BenchError(f"{evicted} of {chunks} chunks of a prompt were evicted.")


def by_share(
    shares: Sequence[float],
    prompts: Sequence[P],
    *,
    evict: Callable[[P], None],
    ask: Callable[[P, bool], float],
    running: Fleet,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Shares in rising order: what is stale stays stale. `ask` returns seconds."""
    source = random.Random(3)  # noqa: S311  no secret
    found, gone = [], 0
    for share in sorted(shares):
        progress(f"stale placements: {share:.0%}")
        for each in prompts[gone : (upto := round(share * len(prompts)))]:
            evict(each)
        gone = max(gone, upto)
        order = list(range(len(prompts)))
        source.shuffle(order)
        before = Counts.of(running.b)
        asked = [(number < gone, ask(prompts[number], number < gone)) for number in order]
        counts = Counts.of(running.b).since(before)
        running.emptied(running.b)
        found.append({"stale_share": gone / len(prompts), "prompts": len(prompts), **_times(asked), **counts})
    return found


def _times(asked: Sequence[tuple[bool, float]]) -> dict[str, Any]:
    """Of all prompts, and of those apart that were there and that were stale."""
    told: dict[str, Any] = _marks([seconds for _, seconds in asked])
    for name, wanted in (("there", False), ("stale", True)):
        some = [seconds for gone, seconds in asked if gone is wanted]
        told[f"{name}_mean_ms"] = _marks(some)["mean_ms"] if some else None
    return told


def _marks(seconds: Sequence[float]) -> dict[str, float]:
    marks = {"mean_ms": stats.mean(seconds), "p99_ms": stats.percentile(seconds, 0.99)}
    return {name: round(value * 1e3, 3) for name, value in marks.items()}
