"""The flags of verbs that run the engine: how many requests, which pages, how much memory. Counted per TP group."""

import argparse
from dataclasses import dataclass, fields
from typing import Any

from .flags import FlagError, check_range

BLOCK_SIZES = (32, 64, 128)
GIB = 1 << 30
PROJECTIONS = ("auto", "activations", "weights")
MOST = {"batch": 1 << 16, "prefill_rows": 1 << 20, "prefix_points": 1 << 20}


@dataclass(frozen=True)
class EngineFlags:
    """What the user asked of the engine; None leaves the choice to the verb or the engine."""

    batch: int | None = None
    prefill_rows: int = 512
    block_size: int = 32
    cache_gib: float | None = None
    prefix_points: int | None = None
    projection: str = "auto"

    def arguments(self) -> dict[str, Any]:
        """Keywords of Engine, but for `requests`, which is the verb's default or batch."""
        return {
            "prefill_rows": self.prefill_rows,
            "block_size": self.block_size,
            "cache_bytes": None if self.cache_gib is None else int(self.cache_gib * GIB),
            "prefix_points": self.prefix_points,
            "projection": self.projection,
        }


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a verb's parser."""
    group = parser.add_argument_group("engine, per TP group")
    group.add_argument("--batch", type=int, metavar="N", help="requests at once (default: as many as there are, to 8)")
    group.add_argument(
        "--prefill-rows", type=int, default=512, metavar="N", help="prompt rows in a step (default: 512)"
    )
    group.add_argument(
        "--block-size", type=int, default=32, choices=BLOCK_SIZES, help="positions of a window page (default: 32)"
    )
    group.add_argument(
        "--cache-gib", type=float, metavar="GIB", help="memory of a rank's caches (default: what the requests take)"
    )
    group.add_argument(
        "--prefix-points",
        type=int,
        metavar="N",
        help="prefixes kept for later requests to start from, 0 for none (default: as many as requests at once)",
    )
    group.add_argument(
        "--projection",
        choices=PROJECTIONS,
        default="auto",
        help="what travels in the output projection: rows, weights, or the cheaper for each step (default: auto)",
    )


def engine_flags(args: argparse.Namespace) -> EngineFlags:
    """The flags, checked one by one. FlagError."""
    for name, most in MOST.items():
        value = getattr(args, name)
        if value is not None:
            check_range(f"--{name.replace('_', '-')}", value, 0 if name == "prefix_points" else 1, most)
    if args.cache_gib is not None and not 0 < args.cache_gib < 1 << 20:
        raise FlagError(f"--cache-gib is {args.cache_gib}, allowed: above 0 to {1 << 20:,}")
    return EngineFlags(**{field.name: getattr(args, field.name) for field in fields(EngineFlags)})
