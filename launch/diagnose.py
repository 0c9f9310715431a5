"""`meshspark diagnose DIR`: where every rank of a job stands, read from outside, also of stuck or stopped ranks."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from .flags import STANDARD_OUTPUT, FlagParser, check_json, check_range
from .output import people, show, write_json
from .worker import run_main


def parser() -> FlagParser:
    """The verb's flags."""
    flags = FlagParser(prog="meshspark diagnose", description=__doc__, allow_abbrev=False)
    flags.add_argument("folder", type=Path, metavar="DIR", help="what --control named, or rank 0 printed at its start")
    flags.add_argument("--latest", type=int, default=4, metavar="N", help="calls to show of each rank (default: 4)")
    flags.add_argument("--json", nargs="?", const=STANDARD_OUTPUT, metavar="FILE", help="as for the other verbs")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a folder without control pages."""
    return run_main("diagnose", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    from ..comm.control_page import RECORDS, process_state, read_folder

    args = parser().parse_args(argv)
    check_json(args.json)
    check_range("--latest", args.latest, 1, RECORDS)
    now = time.time()
    found = read_folder(args.folder, args.latest)
    table = Table("rank", "process", "state", "calls", "stands", "for", "latest calls", show_lines=True)
    rows = []
    for each in found:
        state, where = process_state(each.pid), "inside a call" if each.inside else "between calls"
        age = max(0.0, now - each.time)
        cells = [str(each.rank), str(each.pid), state, str(each.calls), where, f"{age:.1f} s", "\n".join(each.notes)]
        table.add_row(*cells)
        rows.append({**vars(each), "notes": list(each.notes), "state": state, "seconds": age})
    write_json(args.json, {"ranks": rows})
    show(people(args.json), table)
    behind = min(each.calls for each in found)
    if len({each.calls for each in found}) > 1:
        ranks = [each.rank for each in found if each.calls == behind]
        print(f"fewest calls: ranks {ranks}, with {behind}", file=people(args.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
