"""`meshspark checkpoint`: inspect one, or synthesize a random one."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from ..models.checkpoint.forms import OFFICIAL
from ..models.checkpoint.inventory import Inventory, format_inventory, inventory, preset_inventory
from ..models.checkpoint.synthetic import synthesize
from ..models.v4.config import flash, flash_dspark, tiny, tiny_dspark, tiny_mtp
from .flags import STANDARD_OUTPUT, FlagParser, check_json
from .output import people, show, write_json
from .worker import run_main

PUBLISHED = {"flash": flash, "flash-dspark": flash_dspark}
SYNTHETIC = {"tiny": tiny, "tiny-dspark": tiny_dspark, "tiny-mtp": tiny_mtp}


def parser() -> FlagParser:
    """The verb's flags."""
    flags = FlagParser(prog="meshspark checkpoint", description=__doc__, allow_abbrev=False)
    verbs = flags.add_subparsers(dest="verb", required=True, metavar="inspect|synthesize")
    inspect = verbs.add_parser("inspect", help="print what a checkpoint holds", allow_abbrev=False)
    inspect.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="a checkpoint's folder, verified first")
    inspect.add_argument("--preset", choices=sorted(PUBLISHED), help="totals that the name table implies for a model")
    _add_json(inspect)
    write = verbs.add_parser("synthesize", help="write a random checkpoint", allow_abbrev=False)
    write.add_argument("directory", type=Path, metavar="DIR", help="made if need be")
    write.add_argument("--preset", choices=sorted(SYNTHETIC), default="tiny", help="shape (default: tiny)")
    write.add_argument("--seed", type=int, default=0, help="default: 0")
    _add_json(write)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for wrong flags or a faulty checkpoint."""
    return run_main("checkpoint", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    check_json(args.json)
    return _inspect(args) if args.verb == "inspect" else _synthesize(args)


def _inspect(args: argparse.Namespace) -> int:
    if args.directory is None and args.preset is None:
        raise ValueError("inspect needs DIR, or --preset for the totals that the name table implies")
    found = {}
    if args.preset is not None:
        found[f"preset {args.preset}"] = preset_inventory(PUBLISHED[args.preset]())
    if args.directory is not None:
        found[str(args.directory)] = inventory(args.directory)
    write_json(args.json, {"inventories": {name: format_inventory(each) for name, each in found.items()}})
    for name, each in found.items():
        show(people(args.json), inventory_table(name, each))
        for note in each.notes:
            print(f"note: {note}", file=people(args.json))
    return 0


def _synthesize(args: argparse.Namespace) -> int:
    try:
        notes = synthesize(args.directory, SYNTHETIC[args.preset](), args.seed)
    except OSError as problem:
        raise ValueError(f"{args.directory}: {problem}") from problem
    written = inventory(args.directory)
    write_json(args.json, {"directory": str(args.directory), "notes": list(notes), **format_inventory(written)})
    out = people(args.json)
    print(f"{args.directory}: {written.tensors:,} tensors, {written.num_bytes:,} bytes, seed {args.seed}", file=out)
    for note in notes:
        print(f"note: {note}", file=out)
    return 0


def inventory_table(name: str, found: Inventory) -> Table:
    """Totals by part, and the dtypes."""
    table = Table("part", title=name, title_justify="left")
    for heading in ("tensors", "bytes", "parameters"):
        table.add_column(heading, justify="right")
    for part, total in found.parts.items():
        table.add_row(part, f"{total.tensors:,}", f"{total.num_bytes:,}", f"{total.parameters:,}")
    table.add_section()
    table.add_row("all", f"{found.tensors:,}", f"{found.num_bytes:,}", f"{found.parameters:,}")
    shards = "" if found.shards is None else f"; {found.shards} shards"
    form = "" if found.form == OFFICIAL else f"; form {found.form}"
    table.caption = ", ".join(f"{dtype} {count:,}" for dtype, count in sorted(found.dtypes.items())) + shards + form
    return table


def _add_json(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--json", nargs="?", const=STANDARD_OUTPUT, metavar="FILE", help="write JSON")


if __name__ == "__main__":
    sys.exit(main())
