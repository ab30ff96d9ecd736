"""Nouns of the transfer middleware. Imports no JAX."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

MAX_TAG_CHARACTERS = 256


class BlockRun(NamedTuple):
    """`num_blocks` blocks that are contiguous in the source pool and in the destination pool.

    Block `src_start + i` of the source goes to block `dst_start + i` of the destination.
    """

    src_start: int
    dst_start: int
    num_blocks: int


class PathType(enum.Enum):
    """The five kinds of path (flexFlow's names)."""

    DIRECT = "Direct"
    NVLINK_RELAY = "NVLinkRelay"
    CROSS_NODE_RELAY = "CrossNodeRelay"
    SPLIT_PATH = "SplitPath"
    STORAGE_RELAY = "StorageRelay"

    def __str__(self) -> str:
        return self.value


class Verification(enum.Enum):
    """What the receiver compares before it acknowledges."""

    NONE = "none"
    CHECKSUM = "checksum"


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """Bytes, or blocks, to move from one node to another.

    Path selection needs `src`, `dst` and `data_bytes` only; executing needs `runs` too.

    Attributes:
        src, dst: names of topology nodes.
        data_bytes: bytes to move; with `runs`, their bytes.
        runs: which blocks; empty when only a path is asked for.
        block_bytes: size of a block, the grain at which a split may cut; 0 where nothing may be
            cut.
        ttft_sensitive: someone waits for the first token: every hop's latency counts.
        deadline_s: seconds from submission after which the transfer fails; None for none.
        verification: what the receiver compares before it acknowledges.
        tag: what the caller calls it, told to the destination; means nothing here. At most
            `MAX_TAG_CHARACTERS`.
        src_generations, dst_generations: for each block in run order, its generation when the
            request was made; a block that has another by then is refused. Empty for no check.
    """

    src: str
    dst: str
    data_bytes: int
    runs: tuple[BlockRun, ...] = ()
    block_bytes: int = 0
    ttft_sensitive: bool = False
    deadline_s: float | None = None
    verification: Verification = Verification.NONE
    src_generations: tuple[int, ...] = ()
    dst_generations: tuple[int, ...] = ()
    tag: str = ""

    def __post_init__(self) -> None:
        if self.data_bytes < 1:
            raise ValueError(f"data_bytes={self.data_bytes} must be at least 1")
        if self.block_bytes < 0:
            raise ValueError(f"block_bytes={self.block_bytes} must not be negative")
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise ValueError(f"deadline_s={self.deadline_s} must be above 0, or None")
        if len(self.tag) > MAX_TAG_CHARACTERS:
            raise ValueError(
                f"tag has {len(self.tag)} characters, at most {MAX_TAG_CHARACTERS} are carried"
            )
        for run in self.runs:
            if run.num_blocks < 1 or run.src_start < 0 or run.dst_start < 0:
                raise ValueError(f"{run} is not a run: starts from 0 up, at least one block")
        blocks = sum(run.num_blocks for run in self.runs)
        if self.runs and blocks * self.block_bytes != self.data_bytes:
            raise ValueError(
                f"data_bytes={self.data_bytes} is not {blocks} blocks of {self.block_bytes} bytes"
            )
        for name in ("src_generations", "dst_generations"):
            count = len(getattr(self, name))
            if count not in (0, blocks):
                raise ValueError(f"{name} has {count} entries for {blocks} blocks")


@dataclass(frozen=True, slots=True)
class PathPart:
    """One route of a decision, and the runs that go over it.

    Attributes:
        hops: node names from source to destination.
        data_bytes: bytes over this route.
        runs: blocks over this route; empty when the request named none.
    """

    hops: tuple[str, ...]
    data_bytes: int
    runs: tuple[BlockRun, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path that was weighed.

    Attributes:
        path_type: its kind.
        parts: one route; several for a split.
        score: higher is better.
        terms: the score's summands by name, signed and weighted; they add up to `score`.
        estimated_bandwidth: GB/s.
        rejected: why it could not be chosen; empty if it could.
    """

    path_type: PathType
    parts: tuple[PathPart, ...]
    score: float
    terms: dict[str, float]
    estimated_bandwidth: float
    rejected: str = ""

    def __str__(self) -> str:
        routes = " + ".join(" > ".join(part.hops) for part in self.parts)
        terms = " ".join(f"{name} {value:+.2f}" for name, value in self.terms.items() if value)
        text = f"{self.path_type} {routes} {self.estimated_bandwidth:.1f} GB/s"
        text += f" score {self.score:+.2f} ({terms})"
        return f"{text} rejected: {self.rejected}" if self.rejected else text

    @property
    def hops(self) -> tuple[str, ...]:
        """Node names from source to destination, of the first route."""
        return self.parts[0].hops


@dataclass(frozen=True, slots=True)
class PathDecision:
    """What the selector chose, and everything it weighed.

    Attributes:
        request: what was asked.
        chosen: the winner.
        candidates: all that were weighed, best first.
        reason: one clause that says why the winner won.
    """

    request: TransferRequest
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    reason: str

    @property
    def chosen_type(self) -> PathType:
        return self.chosen.path_type

    @property
    def estimated_bandwidth(self) -> float:
        """GB/s."""
        return self.chosen.estimated_bandwidth

    @property
    def hops(self) -> tuple[str, ...]:
        return self.chosen.hops

    def __str__(self) -> str:
        """One line: the winner, why, and every candidate with its terms."""
        weighed = "; ".join(map(str, self.candidates))
        return f"{self.chosen}: {self.reason}. Weighed: {weighed}"

    @property
    def fallbacks(self) -> tuple[Candidate, ...]:
        """What to try next, best first: usable candidates other than the winner."""
        return tuple(c for c in self.candidates if c is not self.chosen and not c.rejected)
