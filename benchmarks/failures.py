"""`meshspark bench failures`: how soon every rank knows that one has died, or that a call differs."""

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table

from ..comm.collectives import all_gather_rows
from ..comm.connect import Connections, Wish
from ..launch.flags import STANDARD_OUTPUT, TRANSPORTS, FlagParser, check_json, check_range
from ..launch.output import people, show, write_json
from ..launch.spawn import loopback
from ..launch.worker import environment_for_ranks, run_main
from ..parallel.errors import CommError
from ..parallel.groups import Groups
from ..parallel.topology import Topology

TIMEOUT = 20.0
PAUSE = 0.2
"""Seconds before the fault, in which all others have begun to wait."""

STAGE = "failure"


def die(groups: Groups) -> float:
    """Rank 1 is killed while the others wait for it; the time just before."""
    time.sleep(PAUSE)
    return time.monotonic()


def differ(groups: Groups) -> float:
    """Rank 1 comes with other rows than the others, who wait."""
    time.sleep(PAUSE)
    begin = time.monotonic()
    with suppress(CommError):
        all_gather_rows(torch.zeros(5, 3), groups.world, stage=STAGE)
    return begin


FAULTS: dict[str, Callable[[Groups], float]] = {"death": die, "mismatch": differ}


def parser() -> FlagParser:
    """The verb's flags."""
    flags = FlagParser(prog="meshspark bench failures", description=__doc__, allow_abbrev=False)
    flags.add_argument("--ranks", type=int, default=3, help="ranks of the group (default: 3)")
    flags.add_argument("--rounds", type=int, default=20, help="times that each fault is made (default: 20)")
    flags.add_argument("--transport", default="auto", choices=TRANSPORTS, help="as for the other verbs")
    flags.add_argument("--json", nargs="?", const=STANDARD_OUTPUT, metavar="FILE", help="as for the other verbs")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where a rank did not learn of a fault, 2 for wrong flags."""
    return run_main("bench failures", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    check_json(args.json)
    check_range("--ranks", args.ranks, 2, 64)
    check_range("--rounds", args.rounds, 1, 10_000)
    rows = []
    table = Table("fault", "ranks", "transport", "rounds", "p50, ms", "p99, ms", "most, ms", "not named")
    for fault in FAULTS:
        found = [entry for _ in range(args.rounds) for entry in _round(fault, args.ranks, args.transport)]
        rows.append(summary(fault, args.ranks, args.transport, args.rounds, found))
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in rows[-1].values()))
    write_json(args.json, {"failures": rows})
    show(people(args.json), table)
    return 1 if any(row["not_named"] for row in rows) else 0


def summary(
    fault: str, ranks: int, transport: str, rounds: int, found: Sequence[tuple[float, bool]]
) -> dict[str, str | int | float]:
    """A row: milliseconds from the fault to the error, over the ranks that wait and the rounds.

    found: (seconds, whether the error names the rank) of each. p99 is the value that one in a hundred exceeds.
    """
    times = sorted(1000 * seconds for seconds, _ in found)
    figures = {"p50_ms": statistics.median(times), "p99_ms": times[-(-99 * len(times) // 100) - 1]}
    silent = sum(not named for _, named in found) + rounds * (ranks - 1) - len(found)
    head: dict[str, str | int | float] = {"fault": fault, "ranks": ranks, "transport": transport, "rounds": rounds}
    return {**head, **figures, "max_ms": times[-1], "not_named": silent}


def _round(fault: str, ranks: int, transport: str) -> list[tuple[float, bool]]:
    """One fault among new ranks; (seconds, named) of each rank but the faulty one."""
    with tempfile.TemporaryDirectory(prefix="meshspark-") as folder:
        place = Path(folder)
        with environment_for_ranks(ranks, loopback()):
            children = [_fork(partial(_rank, place, rank, ranks, fault, transport)) for rank in range(ranks)]
        for child in children:
            os.waitpid(child, 0)
        said = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in place.glob("*.json")}
    begin = said.pop("1")[0]
    return [(time_seen - begin, bool(named)) for time_seen, named in said.values()]


def _fork(act: Callable[[], None]) -> int:
    """A child process that does this and ends; its id. The parent has started no thread."""
    child = os.fork()
    if child:
        return child
    try:
        act()
    finally:
        sys.stdout.flush()
        os._exit(0)


def _rank(folder: Path, rank: int, ranks: int, fault: str, transport: str) -> None:
    torch.set_num_threads(1)
    groups = Groups.start(
        Topology(ranks, 1, ranks),
        rank=rank,
        backend="gloo",
        timeout=TIMEOUT,
        store=dist.FileStore(str(folder / "ranks"), ranks),
        connections=Connections(Wish(transport)),
    )
    x = torch.zeros(4, 3)
    all_gather_rows(x, groups.world, stage=STAGE)
    if rank == 1:
        begin = FAULTS[fault](groups)
        (folder / "1.json").write_text(json.dumps([begin]), encoding="utf-8")
        if fault == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        return
    try:
        all_gather_rows(x, groups.world, stage=STAGE)
    except CommError as problem:
        named = 1 in problem.ranks
        (folder / f"{rank}.json").write_text(json.dumps([time.monotonic(), named]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
