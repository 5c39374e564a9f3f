from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvwire.cli import units
from kvwire.cli.bench.transfer import CHUNK_BYTES, MIB
from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from kvwire.cli.bench.blocks import Memory

TRANSFER, ENGINES, STALE, RESTART = "transfer", "engines", "stale", "restart"
PARTS: Final = (TRANSFER, ENGINES, STALE, RESTART)
PATHS: Final = ("ucx-remote", "ucx-local")
SHARED, PRIVATE, BY_PATH = "shm", "private", "auto"
BLOCK_TOKENS: Final = 32
"""Of the engines."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured, and of which parts. `shares` are those of prompts whose placements are stale."""

    parts: tuple[str, ...] = PARTS

    paths: tuple[str, ...] = PATHS
    sizes: tuple[int, ...] = (64 * MIB, 1024 * MIB)
    rounds: int = 0
    warmup: int = 2
    memory: Memory = "auto"
    arena: str = BY_PATH
    """Of the servers. With private memory, which has huge pages, clients take the path under test, too."""
    idle_s: float = 3.0

    model: str = "gemma"
    prompt_tokens: int = 1000
    chunk_size: int = 64
    threads: int = 1
    first_tokens: int = 6
    """Prompts of which the time to the first token is compared."""
    contexts: int = 6
    question_tokens: int = 32
    answer_tokens: int = 16
    in_flight: int = 4
    experiments: int = 3

    shares: tuple[float, ...] = (0.0, 0.1, 0.5)
    stale_prompts: int = 30
    stale_lookups: int = 300
    lookup_chunks: int = 16

    restarts: int = 3
    restart_prompts: int = 64

    def rounds_of(self, size: int) -> int:
        return self.rounds or (5 if size >= 512 * MIB else 15)

    def is_private(self, path: str) -> bool:
        """Within a host the kernel reads page by page, so there it is as an operator would have it."""
        return self.arena == PRIVATE or (self.arena == BY_PATH and path == "ucx-local")

    def check(self) -> None:
        choices = (
            ("part", self.parts, PARTS),
            ("path", self.paths, PATHS),
            ("arena", (self.arena,), (SHARED, PRIVATE, BY_PATH)),
        )
        for name, given, known in choices:
            unknown = [each for each in given if each not in known]
            if unknown:
                raise ConfigError(f"--{name} {unknown[0]}: it is one of {', '.join(known)}.", setting=name)
        odd = [size for size in self.sizes if size < CHUNK_BYTES or size % CHUNK_BYTES]
        if odd:
            told = f"{units.exact_size(odd[0])} is no multiple of a chunk, {units.exact_size(CHUNK_BYTES)}"
            raise ConfigError(f"--size {told}.", setting="size")
        if self.prompt_tokens <= self.chunk_size:
            raise ConfigError(
                f"--prompt-tokens {self.prompt_tokens}: nothing of it is shared with chunks of "
                f"{self.chunk_size} tokens.",
                setting="prompt_tokens",
            )


QUICK: Final = Plan(
    sizes=(64 * MIB,),
    rounds=2,
    warmup=1,
    idle_s=0.5,
    model="tiny",
    prompt_tokens=400,
    first_tokens=2,
    contexts=3,
    answer_tokens=4,
    experiments=1,
    stale_prompts=10,
    stale_lookups=40,
    restarts=1,
    restart_prompts=16,
)
