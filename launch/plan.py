"""`meshspark plan`: memory, exchanges and step time of a deployment, before any device is there. Allocates nothing."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..models.checkpoint.verify import read_config
from ..models.numerics import numerics
from ..models.v4.config import PRESETS, V4Config
from ..models.v4.estimate import Device
from .deployment import DEPLOYMENTS, Row, combine, deployment, table
from .drafting import SPECULATIVE
from .engine_flags import GIB, add_engine_flags, engine_flags
from .flags import FlagParser, add_common, check_json, check_range, parse_device, resolve_topology
from .generate import SAMPLE
from .output import people, show, write_json
from .plan_data import Settings, make_plan
from .plan_tables import tables
from .worker import run_main

LEFT_OUT = ("backend", "timeout", "check", "control", "record", "trace", "seed")
DEFAULTS: dict[str, Any] = {
    "numerics": "float32",
    "tp": None,
    "ep": None,
    "ranks": None,
    "context": 4096,
    "block_size": 32,
    "batch": 8,
    "prefill_rows": 512,
}
"""What holds where neither a flag nor a deployment says anything; the engine's own defaults."""

RATES = {
    "device_gib": (64.0, "memory of a rank's device"),
    "memory_gbs": (1600.0, "GB/s that a rank reads from its memory"),
    "link_gbs": (200.0, "GB/s that a rank sends to others"),
    "tflops": (350.0, "TFLOPS of a rank's products that are not INT8"),
    "int8_tops": (700.0, "TOPS of its INT8 products"),
    "call_us": (20.0, "microseconds that an exchange takes beside its bytes"),
}
"""Rates of no device in particular: (default, what)."""


def parser() -> FlagParser:
    """The verb's flags."""
    flags = FlagParser(prog="meshspark plan", description=__doc__, allow_abbrev=False)
    model = flags.add_mutually_exclusive_group()
    model.add_argument("--preset", choices=sorted(PRESETS), help="shape of the model (default: the bundled sample's)")
    model.add_argument("--checkpoint", type=Path, metavar="DIR", help="a checkpoint whose config.json gives the shape")
    flags.add_argument(
        "--deployment", choices=sorted(DEPLOYMENTS), help="all settings of a point at once; a flag beside it wins"
    )
    flags.add_argument("--context", type=int, metavar="N", help="positions of a request (default: 4096)")
    flags.add_argument(
        "--verify-rows", type=int, metavar="S", help="rows of a decoding request in a step: one and its drafts"
    )
    flags.add_argument(
        "--speculative", choices=SPECULATIVE, help="drafter in the plan (default: dspark if the shape has one)"
    )
    add_engine_flags(flags)
    device = flags.add_argument_group("device, of each rank")
    for name, (default, what) in RATES.items():
        device.add_argument(
            f"--{name.replace('_', '-')}",
            type=float,
            default=default,
            metavar="X",
            help=f"{what} (default: {default:g})",
        )
    add_common(flags, leave_out=LEFT_OUT)
    # None tells a flag that was given from one that was not.
    flags.set_defaults(**dict.fromkeys(DEFAULTS), verify_rows=None, speculative=None)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for wrong flags, or a checkpoint without a readable config."""
    return run_main("plan", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    check_json(args.json)
    out = people(args.json)
    point, rows = None, tuple[Row, ...]()
    if args.deployment is not None:
        point = deployment(args.deployment)
        given = {name: getattr(args, name) for name in point.settings()}
        if args.checkpoint is not None:
            given["preset"] = str(args.checkpoint)
        rows = combine(point, given)
        for row in rows:
            if row.name != "preset" or args.checkpoint is None:
                setattr(args, row.name, row.used)
        show(out, table(point, rows))
    settings, name, speculative = resolve_plan(args)
    data: dict[str, Any] = {"model": name, "speculative": speculative, "settings": _told(settings)}
    if point is not None:
        shown = [{"setting": r.name, "point": r.point, "flag": r.flag, "used": r.used} for r in rows]
        data["deployment"] = {"name": point.name, "settings": shown}
    data |= make_plan(settings)
    show(out, *tables(data))
    write_json(args.json, data)
    return 0


def resolve_plan(args: argparse.Namespace) -> tuple[Settings, str, str]:
    """(settings, name of the model, kind of drafter) of parsed flags. ValueError names flag, value and allowed."""
    for name, default in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    config, model = _model(args)
    engine = engine_flags(args)
    if not 1 <= args.context <= config.max_position_embeddings:
        raise ValueError(
            f"--context is {args.context}, allowed: 1 to {config.max_position_embeddings}, the positions of {model}"
        )
    for name in RATES:
        check_range(f"--{name.replace('_', '-')}", getattr(args, name), 0 if name == "call_us" else 1e-9, 1e9)
    topology = resolve_topology(args.ranks, args.tp, args.ep)
    topology.check_model(config.o_groups, config.vocab_size, config.n_routed_experts)
    speculative, verify_rows = _drafting(args, config)
    cpu = parse_device(args.device).kind == "cpu"
    settings = Settings(
        config=config,
        topology=topology,
        numerics=numerics(args.numerics),
        context=args.context,
        batch=args.batch,
        prefill_rows=engine.prefill_rows,
        verify_rows=verify_rows,
        block_size=engine.block_size,
        device=Device(args.memory_gbs, args.link_gbs, args.tflops, args.int8_tops, args.call_us),
        device_gib=args.device_gib,
        gamma=verify_rows - 1 if speculative != "none" else 0,
        cache_bytes=None if engine.cache_gib is None else int(engine.cache_gib * GIB),
        prefix_points=engine.prefix_points,
        projection=args.projection,
        local=cpu and args.transport != "torch",
    )
    return settings, model, speculative


def _model(args: argparse.Namespace) -> tuple[V4Config, str]:
    if args.preset is not None and args.checkpoint is None:
        return PRESETS[args.preset](), str(args.preset)
    directory = SAMPLE if args.checkpoint is None else args.checkpoint
    return read_config(directory), "the bundled sample" if directory == SAMPLE else str(directory)


def _drafting(args: argparse.Namespace, config: V4Config) -> tuple[str, int]:
    """(kind of drafter, verified rows of a request). ValueError where the shape has no such drafter."""
    chosen = args.speculative or ("dspark" if config.dspark is not None else "none")
    has = {"none": True, "dspark": config.dspark is not None, "mtp": bool(config.draft_ratios) and not config.dspark}
    if not has[chosen]:
        raise ValueError(
            f"--speculative is {chosen}, which this shape has no drafter for; allowed: "
            f"{', '.join(kind for kind in SPECULATIVE if has[kind])}"
        )
    drafts = {"none": 0, "mtp": 1, "dspark": 0 if config.dspark is None else config.dspark.block_size}[chosen]
    rows = 1 + drafts if args.verify_rows is None else args.verify_rows
    # An MTP layer drafts one token.
    check_range("--verify-rows", rows, 1 if chosen == "none" else 2, 2 if chosen == "mtp" else 1 << 10)
    return chosen, rows


def _told(settings: Settings) -> dict[str, Any]:
    names = ("context", "batch", "prefill_rows", "verify_rows", "block_size", "gamma", "cache_bytes", "projection")
    told = {name: getattr(settings, name) for name in names}
    return {**told, "prefix_points": settings.wish.prefix_points}


def at_point(**changes: Any) -> Settings:
    """The settings of flash-dspark-16 on the default device, with some changed: for tests and tools."""
    args = parser().parse_args([])
    for row in combine(deployment("flash-dspark-16"), {}):
        setattr(args, row.name, row.used)
    return replace(resolve_plan(args)[0], **changes)


if __name__ == "__main__":
    sys.exit(main())
