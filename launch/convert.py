"""`meshspark convert`: a checkpoint in INT8, or an official drafter (dspark, mtp) as a draft of ours and back."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from ..models.checkpoint.convert import convert_w8a8
from ..models.checkpoint.inventory import format_inventory, inventory
from .checkpoint import inventory_table
from .convert_dspark import add_dspark, convert_dspark
from .flags import STANDARD_OUTPUT, FlagParser, check_json
from .output import people, show, write_json
from .worker import run_main


def parser() -> FlagParser:
    """The verb's flags."""
    flags = FlagParser(prog="meshspark convert", description=__doc__, allow_abbrev=False)
    forms = flags.add_subparsers(dest="form", required=True, metavar="w8a8|dspark|mtp")
    w8a8 = forms.add_parser("w8a8", help="INT8 codes with a scale for each output channel", allow_abbrev=False)
    w8a8.add_argument("source", type=Path, metavar="IN", help="a checkpoint's folder, verified first")
    w8a8.add_argument("target", type=Path, metavar="OUT", help="a folder that does not exist yet, or an empty one")
    w8a8.add_argument("--json", nargs="?", const=STANDARD_OUTPUT, metavar="FILE", help="write JSON")
    add_dspark(forms.add_parser("dspark", help="mtp.* of a DSpark drafter", allow_abbrev=False))
    add_dspark(forms.add_parser("mtp", help="mtp.0.* of a plain MTP layer", allow_abbrev=False), mtp=True)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for wrong flags, a faulty checkpoint or a folder that cannot be written."""
    return run_main("convert", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    check_json(args.json)
    out = people(args.json)
    act = _w8a8 if args.form == "w8a8" else convert_dspark
    try:
        return act(args, out, _shown_progress(out))
    except OSError as problem:
        raise ValueError(f"{args.target}: {problem}") from problem


def _shown_progress(out: TextIO) -> Callable[[int, int], None]:
    def progress(shard: int, shards: int) -> None:
        if shards > 1:
            print(f"shard {shard} of {shards}", file=out, flush=True)

    return progress


def _w8a8(args: argparse.Namespace, out: TextIO, progress: Callable[[int, int], None]) -> int:
    source = convert_w8a8(args.source, args.target, progress=progress)
    written = inventory(args.target)
    notes = [*source.notes, *written.notes]
    document = {"source": str(args.source), "directory": str(args.target), **format_inventory(written), "notes": notes}
    write_json(args.json, document)
    show(out, inventory_table(f"{args.target}: {args.source} in INT8", written))
    for note in notes:
        print(f"note: {note}", file=out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
