"""What the scheduler's side and the workers' side tell each other in every step. All of it can be pickled.

`connector.py` registers the classes with vLLM's own, so that this needs no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvwire.keys import Namespace
    from kvwire.vllm.plan import BlockPlan


@dataclass(frozen=True, slots=True)
class Prompt:
    """How the server knows the chunks of a request: by its session, or by `keys` of the plan's chunks."""

    session_id: str
    namespace: Namespace | None = None
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """One load or store of one request. A load without blocks has failed before it began.

    `trace` are the W3C headers of the request's trace. `doomed` are the blocks of a load that cannot be
    planned and that this step's own forward pass reads.
    """

    request_id: str
    prompt: Prompt
    plan: BlockPlan
    trace: Mapping[str, str] = field(default_factory=dict)
    doomed: frozenset[int] = frozenset()


@dataclass(slots=True)
class StepMetadata:
    """Scheduler to workers, for one step.

    `overwritten` holds the blocks that this step hands to somebody new: no store may read them any more.
    None: not known, so no store may be under way at all.
    `held` names finished requests whose blocks wait for their stores. `idle`: no tokens are computed.
    `chunk_size`: what the plans are made for, in tokens; 0 while no server has told it.
    """

    loads: list[Job] = field(default_factory=list)
    stores: list[Job] = field(default_factory=list)
    overwritten: frozenset[int] | None = frozenset()
    held: frozenset[str] = frozenset()
    idle: bool = False
    chunk_size: int = 0


@dataclass(slots=True)
class WorkerReport:
    """Workers to scheduler, since the last step: ended stores and ended loads of the step itself, per
    request, and changes of health per rank."""

    ended_stores: dict[str, int] = field(default_factory=dict)
    healthy: dict[int, bool] = field(default_factory=dict)
    ended_loads: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        return WorkerReport(
            _sum(self.ended_stores, other.ended_stores),
            {**self.healthy, **other.healthy},
            _sum(self.ended_loads, other.ended_loads),
        )


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {each: one.get(each, 0) + other.get(each, 0) for each in {**one, **other}}
