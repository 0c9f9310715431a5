"""A trial of the exchanges that a model uses: rank-stamped patterns, compared bit for bit."""

import sys
from collections.abc import Callable, Sequence

import torch

from ..comm.collectives import all_gather_rows, broadcast_bytes, exchange_counts, exchange_rows
from ..comm.connect import Connections
from ..layouts.bits import same_bits
from ..parallel.errors import TransportError
from ..parallel.groups import Groups
from .flags import FlagParser, add_common
from .spawn import run_job
from .worker import resolve_here, run_main

MODULE = "meshspark.launch.exchange"
ROWS, COLUMNS = 3, 8
SHIFTS = 1 << 16
"""Distinct values of a seed's shift: those of 16 bits."""
NO_EFFECT = ("numerics", "json")
"""Common flags that would change nothing here: the patterns are bits, and the result is the exit code."""
STAGE = "exchange trial"


def stamp(source: int, destination: int, device: str, seed: int = 0) -> torch.Tensor:
    """Rows [3, 8] in bfloat16 that name who sent them to whom; no two pairs below 90 ranks share a row.

    The seed shifts all values, so that trials with other seeds move other bits.
    """
    first = 1 + 32 * (source + 1) + 977 * (destination + 1) + seed % SHIFTS
    values = torch.arange(ROWS * COLUMNS, dtype=torch.int32) + first
    return values.to(torch.int16).view(torch.bfloat16).view(ROWS, COLUMNS).to(device)


def try_exchanges(groups: Groups, seed: int = 0) -> None:
    """Every exchange once over the world. TransportError names the first whose result is wrong. All ranks call it."""
    trials: dict[str, Callable[[Groups, int], tuple[torch.Tensor, torch.Tensor]]] = {
        "all_gather_rows": _gather,
        "exchange_counts": _counts,
        "exchange_rows": _rows,
        "broadcast_bytes": _broadcast,
    }
    for op, trial in trials.items():
        result, expected = trial(groups, seed)
        if not same_bits(result.cpu(), expected.cpu()):
            raise groups.world.error(TransportError, "ended without an error, but its result is wrong", op, STAGE)


def _gather(groups: Groups, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    device, world = groups.device, groups.topology.world
    result = all_gather_rows(stamp(groups.rank, 0, device, seed), groups.world, stage=STAGE)
    return result, torch.cat([stamp(source, 0, device, seed) for source in range(world)])


def _counts(groups: Groups, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    world, first = groups.topology.world, 1 + seed % SHIFTS
    counts = torch.tensor([100 * groups.rank + peer + first for peer in range(world)], device=groups.device)
    result = exchange_counts(counts, groups.world, stage=STAGE)
    return result, torch.tensor([100 * source + groups.rank + first for source in range(world)])


def _rows(groups: Groups, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    device, world = groups.device, groups.topology.world
    sent = torch.cat([stamp(groups.rank, peer, device, seed) for peer in range(world)])
    result = exchange_rows(sent, groups.world, [ROWS] * world, [ROWS] * world, stage=STAGE)
    return result, torch.cat([stamp(source, groups.rank, device, seed) for source in range(world)])


def _broadcast(groups: Groups, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    message = bytes((value + seed) % 256 for value in range(256))
    result = broadcast_bytes(message, groups.control, 0, length=len(message), stage=STAGE)
    expected = (torch.arange(256) + seed % 256) % 256
    return torch.frombuffer(bytearray(result), dtype=torch.uint8), expected.to(torch.uint8)


def parser() -> FlagParser:
    """The trial's flags."""
    flags = FlagParser(prog="python -m meshspark.launch.exchange", description=__doc__, allow_abbrev=False)
    add_common(flags, NO_EFFECT)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """The trial on every rank that the common flags ask for; exit code 0 if all results are right."""
    return run_main("exchange", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = resolve_here(parser().parse_args(arguments))
    return run_job(MODULE, arguments, flags, lambda groups: _try_and_tell(groups, flags.seed))


def _try_and_tell(groups: Groups, seed: int) -> None:
    try_exchanges(groups, seed)
    if groups.rank == 0 and isinstance(groups.connections, Connections):
        print(groups.connections.decision, flush=True)


if __name__ == "__main__":
    sys.exit(main())
