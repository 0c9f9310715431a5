"""`meshspark convert dspark|mtp import|export|attach`: the flags, and what is printed."""

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from ..models.conversion.attaching import attach_dspark
from ..models.conversion.exporting import FORMATS, export_dspark
from ..models.conversion.folder import SHARD_BYTES, Converted
from ..models.conversion.hub import Fetched, fetch, is_repository
from ..models.conversion.importing import DTYPES, import_dspark
from ..models.conversion.variants import MTP, VARIANTS, Variant, variant_of
from .flags import STANDARD_OUTPUT, FlagError
from .output import write_json

UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"(\d{1,15})\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def add_dspark(form: argparse.ArgumentParser, *, mtp: bool = False) -> None:
    """Add the ways and their flags; of an MTP layer there is one variant."""
    ways = form.add_subparsers(dest="way", required=True, metavar="import|export|attach")
    read = ways.add_parser("import", help="official mtp.* to a draft of ours", allow_abbrev=False)
    _add_places(read, "an official checkpoint's folder, or OWNER/NAME of a hub's repository", mtp)
    read.add_argument(
        "--dtype", choices=tuple(DTYPES), default="bfloat16", help="of the weights (default: %(default)s)"
    )
    read.add_argument("--keep-scales", action="store_true", help="keep what gives the official bytes again on export")
    read.add_argument("--ep-slices", type=int, default=1, metavar="N", help="tensors per stack of experts (default: 1)")
    read.add_argument("--revision", metavar="REV", help="branch, tag or commit of the repository (default: its main)")
    write = ways.add_parser("export", help="a draft of ours to official mtp.*", allow_abbrev=False)
    _add_places(write, "a draft's folder, as import or training writes it", mtp)
    write.add_argument(
        "--format", choices=FORMATS, default="bf16", help="unquantised, or quantised again (default: bf16)"
    )
    write.add_argument("--keep-scales", action="store_true", help="quantise with the scales that the import kept")
    write.add_argument(
        "--official-config",
        type=Path,
        metavar="FILE",
        help="the target's config.json (default: what the import left in IN)",
    )
    whole = ways.add_parser("attach", help="a target's checkpoint with a draft of ours in it", allow_abbrev=False)
    whole.add_argument("source", metavar="IN", help="a draft's folder, as import or training writes it")
    whole.add_argument("target", type=Path, metavar="OUT", help="a folder that does not exist yet")
    whole.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="the target")
    whole.add_argument("--replace", action="store_true", help="leave out the drafter that the target has")
    _add_writing(whole)


def _add_places(way: argparse.ArgumentParser, source: str, mtp: bool) -> None:
    way.add_argument("source", metavar="IN", help=source)
    way.add_argument("target", type=Path, metavar="OUT", help="a folder that does not exist yet, or an empty one")
    if not mtp:
        way.add_argument("--variant", choices=tuple(VARIANTS), required=True, help="V4's drafter or V4.1's")
    way.add_argument("--overwrite", action="store_true", help="remove an earlier conversion from OUT first")
    _add_writing(way)


def _add_writing(way: argparse.ArgumentParser) -> None:
    way.add_argument(
        "--max-shard-size", default=f"{SHARD_BYTES // 10**9}GB", metavar="SIZE", help="such as 5GB (default) or 512MiB"
    )
    way.add_argument("--json", nargs="?", const=STANDARD_OUTPUT, metavar="FILE", help="write JSON")


def convert_dspark(args: argparse.Namespace, out: TextIO, progress: Callable[[int, int], None]) -> int:
    """Convert as the flags say; 0. ValueError for wrong flags and faulty sources."""
    shard_bytes = parse_size(args.max_shard_size)
    act = {"import": _import, "export": _export, "attach": _attach}[args.way]
    done = act(args, shard_bytes, progress)
    document = {"source": args.source, "directory": str(args.target), "variant": _variant(args).name, **asdict(done)}
    write_json(args.json, {**document, "notes": list(done.notes)})
    print(
        f"{args.target}: {done.tensors:,} tensors, {done.num_bytes:,} bytes in {done.shards} shards, "
        f"{done.parameters:,} elements",
        file=out,
    )
    for note in done.notes:
        print(f"note: {note}", file=out)
    return 0


def parse_size(text: str) -> int:
    """Bytes of a size: a whole number, and B, KB, MB, GB, TB (of 1000) or KiB, MiB, GiB, TiB (of 1024) or nothing."""
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * UNITS.get(match[2].lower(), 0) if match else 0
    if size < 1:
        raise FlagError(f"--max-shard-size is {text!r}, allowed: such as 5GB, 512MiB or a number of bytes")
    return size


def _variant(args: argparse.Namespace) -> Variant:
    if args.form == MTP.name:
        return MTP
    return VARIANTS["v4"] if args.way == "attach" else variant_of(args.variant)


def _import(args: argparse.Namespace, shard_bytes: int, progress: Callable[[int, int], None]) -> Converted:
    fetched = Fetched(Path(args.source), None)
    if is_repository(args.source):
        fetched = fetch(args.source, args.revision)
    elif args.revision is not None:
        raise FlagError(f"--revision is {args.revision!r}, but IN is a path; it goes with OWNER/NAME of a repository")
    return import_dspark(
        fetched.folder,
        args.target,
        _variant(args),
        dtype=args.dtype,
        keep_scales=args.keep_scales,
        ep_slices=args.ep_slices,
        shard_bytes=shard_bytes,
        overwrite=args.overwrite,
        root=fetched.root,
        progress=progress,
    )


def _export(args: argparse.Namespace, shard_bytes: int, progress: Callable[[int, int], None]) -> Converted:
    return export_dspark(
        Path(args.source),
        args.target,
        _variant(args),
        form=args.format,
        keep_scales=args.keep_scales,
        official_config=args.official_config,
        shard_bytes=shard_bytes,
        overwrite=args.overwrite,
        progress=progress,
    )


def _attach(args: argparse.Namespace, shard_bytes: int, progress: Callable[[int, int], None]) -> Converted:
    return attach_dspark(
        args.checkpoint,
        Path(args.source),
        args.target,
        _variant(args),
        replace=args.replace,
        shard_bytes=shard_bytes,
        progress=progress,
    )
