"""What measurements look like: lines for people, JSON, samples, a plot, and the comparison of two runs."""

import argparse
import importlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import msgpack
import torch

from ..launch.flags import STANDARD_OUTPUT, FlagParser, check_json, check_range
from ..launch.output import SCHEMA, people, write_json
from ..launch.worker import FAILED, OK, run_main
from ..parallel.groups import Groups
from ..parallel.topology import Topology
from .driver import Loop, Measured, Row

BENCHMARK = "collectives"
COLUMNS = {
    "op": 18,
    "transport": 10,
    "bytes": 12,
    "count": 11,
    "dtype": 8,
    "p50": 10,
    "p99": 10,
    "min": 10,
    "algbw": 8,
    "busbw": 8,
    "#wrong": 6,
    "limit": 6,
    "skew": 7,
    "calls": 5,
}
"""Heading of a column -> its width."""

KEY = ("op", "bytes", "dtype", "ranks", "transport", "skew")
"""What tells one row of a run from another."""

LINES = ("-", ":", "-.")
MOST_FILE_BYTES = 64 << 20
MEASURES = {"time": "p50_us", "limit": "limit"}


def heading(loop: Loop, topology: Topology) -> str:
    """What the columns mean, and how often everything was done."""
    return (
        f"# {topology.world} ranks (tp {topology.tp}, ep {topology.ep}); {loop.warm_up} warm-up iterations, "
        f"{loop.iterations} counted, then {loop.checks} checked with new data\n"
        "# bytes: of the busiest rank; p50, p99, min: us of the slowest rank; algbw, busbw: GB/s, 1 GB = 1e9\n"
        "# limit: time of a memory copy of the same bytes in the same loop / time of the exchange"
    )


def header() -> str:
    """The names of the columns."""
    return _aligned(COLUMNS)


def line(row: Row) -> str:
    """One row under `header`."""
    times = [f"{value:.1f}" for value in (row.p50_us, row.p99_us, row.min_us)]
    speeds = [f"{value:.3f}" for value in (row.algbw_gbs, row.busbw_gbs)]
    limit = "n/a" if row.limit is None else f"{row.limit:.3f}"
    calls = "-" if row.calls_per_step is None else str(row.calls_per_step)
    cells = [row.op, row.transport, str(row.bytes), str(row.count), row.dtype, *times, *speeds, str(row.wrong), limit]
    return _aligned([*cells, row.skew or "-", calls])


def _aligned(cells: Sequence[str] | Mapping[str, int]) -> str:
    widths = list(COLUMNS.values())
    pairs = enumerate(zip(cells, widths, strict=True))
    return " ".join(f"{cell:<{width}}" if place < 2 else f"{cell:>{width}}" for place, (cell, width) in pairs)


def document(rows: Sequence[Row], loop: Loop, groups: Groups, environment: Mapping[str, str]) -> dict[str, Any]:
    """The JSON of a run; `environment` is what may be shown of it."""
    return {
        "benchmark": BENCHMARK,
        "topology": asdict(groups.topology),
        "backend": groups.backend,
        "device": groups.device,
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "warm_up": loop.warm_up,
        "iterations": loop.iterations,
        "environment": dict(environment),
        "rows": [asdict(row) for row in rows],
    }


def write_samples(path: Path, measured: Sequence[Measured]) -> None:
    """Every time as msgpack: per exchange its row's key and seconds by transport, rank and iteration."""
    plain = []
    for one in measured:
        seconds = {name: values.tolist() for name, values in one.samples.items()}
        first = one.rows[0]
        plain.append({**{name: getattr(first, name) for name in KEY if name != "transport"}, "seconds": seconds})
    _write("--samples", path, msgpack.packb({"schema": SCHEMA, "benchmark": BENCHMARK, "exchanges": plain}))


def check_target(flag: str, target: str | None) -> None:
    """ValueError where the file of a flag could not be written; nothing without the flag."""
    if target == STANDARD_OUTPUT:
        raise ValueError(f"{flag} is {target!r}, allowed: a file")
    try:
        check_json(target)
    except ValueError as problem:
        raise ValueError(str(problem).replace("--json", flag, 1)) from problem


def _write(flag: str, path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as problem:
        raise ValueError(f"{flag} is {str(path)!r}, which could not be written: {problem}") from problem


def plotting() -> Any:
    """matplotlib's figure module. ValueError naming the extra where it is not installed."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as problem:
        raise ValueError(f"--plot needs matplotlib ({problem}); pip install 'meshspark[plot]'") from problem


def save_figure(figure: Any, path: Path | str) -> None:
    """Write the picture of --plot, in the form that its name ends with. ValueError where it cannot be written."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as problem:
        raise ValueError(f"--plot is {str(path)!r}, which could not be written: {problem}") from problem


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """algbw against bytes, one panel for each op; the dashed line is the memory copy beside each transport."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    columns = min(3, max(1, len(ops)))
    lines = -(-len(ops) // columns) or 1
    figure = plotting().Figure(figsize=(5.5 * columns, 4 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for op, panel in zip(ops, panels, strict=False):
        _panel(panel, op, [row for row in rows if row["op"] == op and row["bytes"] > 0])
    for panel in panels[len(ops) :]:
        panel.set_axis_off()
    save_figure(figure, path)


def _panel(panel: Any, op: str, rows: Sequence[Mapping[str, Any]]) -> None:
    worlds = list(dict.fromkeys(row["ranks"] for row in rows))
    lines: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["bytes"]):
        lines.setdefault((row["ranks"], row["transport"]), []).append(row)
    for (ranks, transport), mine in sorted(lines.items()):
        dashes = LINES[worlds.index(ranks) % len(LINES)]
        label = transport if len(worlds) == 1 else f"{transport}, {ranks} ranks"
        panel.plot([row["bytes"] for row in mine], [row["algbw_gbs"] for row in mine], dashes, marker="o", label=label)
    limited = [row for row in next(iter(lines.values()), []) if row["limit"]]
    copies = [row["algbw_gbs"] / row["limit"] for row in limited]
    panel.plot([row["bytes"] for row in limited], copies, "k--", label="memory copy (limit)")
    panel.set(title=op, xlabel="bytes of the busiest rank", ylabel="algbw, GB/s")
    if rows:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.legend()


def read_rows(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The rows of a run's JSON by KEY. ValueError naming the file and its fault."""
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise ValueError(f"it has more than {MOST_FILE_BYTES:,} bytes")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is no JSON of bench {BENCHMARK}: {problem}") from problem
    if not isinstance(raw, dict) or (raw.get("schema"), raw.get("benchmark")) != (SCHEMA, BENCHMARK):
        raise ValueError(f"{path} is no JSON of bench {BENCHMARK} with schema {SCHEMA}")
    rows = raw.get("rows")
    names = {field.name for field in fields(Row)}
    if not isinstance(rows, list) or not all(isinstance(row, dict) and names <= set(row) for row in rows):
        raise ValueError(f"{path}: rows is no list of maps with {', '.join(sorted(names))}")
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in KEY)
        if not all(part is None or isinstance(part, str | int) for part in key) or key in found:
            raise ValueError(f"{path}: {key} is no key of a row, or is there twice")
        if not _is_number(row["p50_us"]) or not (row["limit"] is None or _is_number(row["limit"])):
            raise ValueError(f"{path}: p50_us or limit of {key} is no number from 0")
        found[key] = row
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def compare(
    old: Mapping[tuple[Any, ...], Mapping[str, Any]],
    new: Mapping[tuple[Any, ...], Mapping[str, Any]],
    tolerance: float,
    by: str = "time",
) -> list[dict[str, Any]]:
    """A verdict for each row: ok, faster, slower, missing, new.

    slower: the new median time is above old * (1 + tolerance); by limit: the new ratio to the copy is below
    old / (1 + tolerance), which holds between machines, or days, of different speed. faster is the reverse.
    """
    verdicts = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = (side[key][MEASURES[by]] if key in side else None for side in (old, new))
        change = None
        if before and after:
            change = after / before if by == "time" else before / after
        if key not in new or (before is not None and after is None):
            verdict = "missing"
        elif key not in old:
            verdict = "new"
        elif change is None:
            verdict = "slower" if by == "limit" and before and not after else "ok"
        else:
            verdict = "slower" if change > 1 + tolerance else "faster" if change * (1 + tolerance) < 1 else "ok"
        shown = {"old": before, "new": after, "change": change, "verdict": verdict}
        verdicts.append({**dict(zip(KEY, key, strict=True)), **shown})
    return verdicts


def parser() -> FlagParser:
    """The comparison's flags."""
    flags = FlagParser(prog="meshspark bench compare", description=compare.__doc__, allow_abbrev=False)
    flags.add_argument("old", type=Path, metavar="A.json", help="of bench collectives --json A.json")
    flags.add_argument("new", type=Path, metavar="B.json")
    flags.add_argument("--tolerance", type=float, default=0.1, help="part by which B may be slower (default: 0.1)")
    flags.add_argument("--by", choices=sorted(MEASURES), default="time", help="median time, or ratio to the copy")
    flags.add_argument("--json", nargs="?", const=STANDARD_OUTPUT, metavar="FILE", help="the verdicts as JSON")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 where a row is slower or missing; 2 for wrong flags or files."""
    return run_main("bench compare", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    args: argparse.Namespace = parser().parse_args(argv)
    check_range("--tolerance", args.tolerance, 0, 1e6)
    check_json(args.json)
    verdicts = compare(read_rows(args.old), read_rows(args.new), args.tolerance, args.by)
    write_json(args.json, {"by": args.by, "tolerance": args.tolerance, "rows": verdicts})
    stream = people(args.json)
    for found in verdicts:
        name = " ".join(str(found[part]) for part in KEY if found[part] is not None)
        change = "" if found["change"] is None else f"x{found['change']:.3f}"
        print(f"{found['verdict']:8} {change:>8}  {name}", file=stream)
    bad = [found for found in verdicts if found["verdict"] in ("slower", "missing")]
    print(f"{len(bad)} of {len(verdicts)} rows are slower or missing", file=stream)
    return FAILED if bad else OK


if __name__ == "__main__":
    sys.exit(main())
