"""`meshspark fixture list|run NAME`: standalone proofs of one transport, stage or composition."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from ..comm.collectives import all_gather_rows
from ..parallel.groups import Groups
from .fixtures import compositions, dspark, stages, transports
from .fixtures.harness import EMPTY, FAILED, NOT_COMPARED, PASSED, Fixture, Options, Row, Run, run_fixture
from .fixtures.record import Recorder, facts_of
from .flags import COMMON, NUMERICS, FlagError, FlagParser, add_common, check_json
from .output import people, show, write_json
from .spawn import run_job
from .worker import named_stage, resolve_here, run_main

MODULE = "meshspark.launch.fixture"
REACHED = "fixture told"
COLOURS = {PASSED: "green", FAILED: "red", NOT_COMPARED: "yellow"}


class FixtureFailed(ValueError):
    """An output is not what it must be; every rank knows, and rank 0 has shown which."""


def registry() -> dict[str, Fixture]:
    """Every fixture by its name, in the order of the list."""
    listed = (*transports.FIXTURES, *stages.FIXTURES, *compositions.FIXTURES, *dspark.FIXTURES)
    found = {fixture.name: fixture for fixture in listed}
    assert len(found) == len(listed), "two fixtures have one name"
    return found


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers from 0, with commas between them."""
    pieces = text.split(",")
    if not all(piece.isascii() and piece.isdecimal() and len(piece) < 10 for piece in pieces):
        raise argparse.ArgumentTypeError(f"{text!r}, allowed: whole numbers from 0 such as 7 or 0,127")
    return tuple(int(piece) for piece in pieces)


OPTIONS: dict[str, dict[str, Any]] = {
    "preset": {"choices": ("tiny", "flash"), "help": "shapes of stages (default: tiny); transports always use Flash's"},
    "numerics": {"choices": NUMERICS, "help": "dtypes of stages (default: float32)"},
    "payload-kind": {"choices": ("kv", "hca", "csa-main", "csa-aux"), "help": "what is gathered (default: csa-main)"},
    "raw-bits": {"action": "store_const", "const": True, "help": "opaque words, NaN payloads included"},
    "local-t": {"type": int, "metavar": "N", "help": "rows of a rank's band (default: its capacity)"},
    "epochs": {"type": int, "metavar": "N", "help": "exchanges one after the other, new data in each (default: 2)"},
    "mode": {
        "choices": ("all", "collectives", "sharded", "prefill", "decode"),
        "help": "parts of publish: all, collectives or sharded; what the drafter's rows are: prefill or decode "
        "(default: the first)",
    },
    "case": {"choices": ("max", "subcapacity"), "help": "full bands or shorter ones (default: max)"},
    "skew": {"choices": ("uniform", "hot", "one", "empty"), "help": "where rows go (default: uniform)"},
    "start-pos": {"type": _numbers, "metavar": "P[,P...]", "help": "first position of each request of the batch"},
    "chunk": {"type": _numbers, "metavar": "N[,N...]", "help": "prefill chunk: rows of each request"},
}
"""Flags of some fixtures -> what argparse needs to know; none given is None, the fixture's own default."""


def parser() -> FlagParser:
    """The verb's flags."""
    flags = FlagParser(prog="meshspark fixture", description=__doc__, allow_abbrev=False)
    verbs = flags.add_subparsers(dest="what", required=True, metavar="list|run")
    listing = verbs.add_parser("list", help="print the fixtures", allow_abbrev=False)
    listing.add_argument("--json", **COMMON["json"])
    run = verbs.add_parser("run", help="run one fixture", allow_abbrev=False)
    run.add_argument("name", metavar="NAME", help="a name that `fixture list` prints")
    for flag, options in OPTIONS.items():
        run.add_argument(f"--{flag}", **options)
    run.add_argument("--save-data", type=Path, metavar="DIR", help="record inputs, outputs and goldens into DIR")
    run.add_argument("--golden-data", type=Path, metavar="DIR", help="take inputs and goldens from a recording")
    add_common(run, ("numerics",))
    run.set_defaults(numerics=None)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """List the fixtures, or run one; exit code 1 if any output is wrong."""
    return run_main("fixture", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    if args.what == "list":
        return _list(args.json)
    fixture = _find(args.name)
    given = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in OPTIONS}
    _check(fixture, given, args)
    args.numerics = args.numerics or COMMON["numerics"]["default"]
    flags = resolve_here(args)
    chosen = {name: value for name, value in given.items() if value is not None}
    options = Options(**{**chosen, "seed": flags.seed})
    try:
        fixture.check(options)
    except ValueError as problem:
        raise FlagError(str(problem)) from problem
    # A tuple does not survive the comparison between ranks; text does.
    facts = {"fixture": fixture.name, "options": json.dumps(dataclasses.asdict(options), sort_keys=True)}
    job = _job(fixture, options, args.save_data, args.golden_data, flags.json)
    return run_job(MODULE, arguments, flags, job, facts)


def _find(name: str) -> Fixture:
    fixtures = registry()
    if name not in fixtures:
        raise FlagError(f"fixture is {name!r}, allowed: {', '.join(fixtures)}")
    return fixtures[name]


def _check(fixture: Fixture, given: Mapping[str, object], args: argparse.Namespace) -> None:
    """No option is accepted and ignored."""
    for name, value in given.items():
        if value is not None and name not in fixture.flags:
            flag = name.replace("_", "-")
            taken = ", ".join(f"--{option.replace('_', '-')}" for option in sorted(fixture.flags)) or "none"
            raise FlagError(f"--{flag} has no effect on {fixture.name}, which takes {taken}")
    if args.save_data is not None and args.golden_data is not None:
        same = args.save_data.resolve() == args.golden_data.resolve()
        if same:
            raise FlagError(f"--save-data and --golden-data are both {args.save_data}, allowed: two folders")


def _job(
    fixture: Fixture, options: Options, save: Path | None, golden: Path | None, json_target: str | None
) -> Callable[[Groups], None]:
    """What every rank does."""

    def job(groups: Groups) -> None:
        facts = facts_of(fixture.name, options, groups.topology, groups.rank, fixture.flags)
        with named_stage(f"fixture {fixture.name}"):
            rows = run_fixture(fixture, Run(groups, options, Recorder(facts, save, golden)))
        if groups.rank == 0:
            _tell(fixture, options, groups, rows, json_target)
        _wait_for_rank_0(groups)
        failed = [row.output for row in rows if row.verdict == FAILED]
        if failed:
            first = f"{len(failed)} of {len(rows)} outputs, {failed[0]} first"
            raise FixtureFailed(f"fixture {fixture.name} failed: {first}")

    return job


def _wait_for_rank_0(groups: Groups) -> None:
    """A rank that left before rank 0 has shown the rows would take it along."""
    all_gather_rows(torch.zeros(1, 1, dtype=torch.uint8), groups.control, stage=REACHED)


def verdict_of(rows: Sequence[Row]) -> str:
    """Of the whole fixture: failed, or not compared, if any output is that has elements; else passed."""
    judged = [row for row in rows if row.detail != EMPTY] or rows
    return next((v for v in (FAILED, NOT_COMPARED) if any(row.verdict == v for row in judged)), PASSED)


def _tell(fixture: Fixture, options: Options, groups: Groups, rows: Sequence[Row], json_target: str | None) -> None:
    t = groups.topology
    title = f"{fixture.name}: ranks {t.world}, tp {t.tp}, ep {t.ep}, transport {groups.world.transport}"
    table = Table(title=title, title_justify="left")
    for heading in ("output", "compared", "wrong", "worst error", "tolerance", "verdict"):
        table.add_column(heading, justify="right" if heading in ("compared", "wrong", "worst error") else "left")
    for row in rows:
        verdict = Text(row.verdict, style=COLOURS[row.verdict])
        table.add_row(row.output, str(row.compared), str(row.wrong), f"{row.worst:.3g}", row.tolerance, verdict)
    stream = people(json_target)
    show(stream, table)
    for row in rows:
        if row.detail:
            print(f"{row.output}: {row.detail}", file=stream)
    moved = {"tp": groups.tp, "ep": groups.ep, "world": groups.world}.get(fixture.group)
    if moved is not None and moved.size == 1:
        print(f"note: the {fixture.group} group has one rank, so nothing moved between ranks", file=stream)
    print(f"{fixture.name}: {verdict_of(rows)}", file=stream, flush=True)
    write_json(json_target, _json(fixture, options, groups, rows))


def _json(fixture: Fixture, options: Options, groups: Groups, rows: Sequence[Row]) -> dict[str, Any]:
    taken = {k: v for k, v in dataclasses.asdict(options).items() if k in fixture.flags or k == "seed"}
    listed = [{**dataclasses.asdict(row), "worst": row.worst if isfinite(row.worst) else None} for row in rows]
    return {
        "fixture": fixture.name,
        "kind": fixture.kind,
        "topology": dataclasses.asdict(groups.topology),
        "transport": groups.world.transport,
        "options": taken,
        "verdict": verdict_of(rows),
        "outputs": listed,
    }


def _list(json_target: str | None) -> int:
    check_json(json_target)
    table = Table(title="fixtures", title_justify="left")
    for heading in ("name", "kind", "proves", "flags"):
        table.add_column(heading)
    fixtures = registry().values()
    for fixture in fixtures:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in sorted(fixture.flags))
        table.add_row(fixture.name, fixture.kind, fixture.summary, flags)
    show(people(json_target), table)
    listed = [{"name": f.name, "kind": f.kind, "summary": f.summary, "flags": sorted(f.flags)} for f in fixtures]
    write_json(json_target, {"fixtures": listed})
    return 0


if __name__ == "__main__":
    sys.exit(main())
