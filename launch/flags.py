"""The flags that mean the same in every verb, and what they resolve to. Imports no torch."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..parallel.topology import BACKENDS, Topology

NUMERICS = ("float64", "float32", "bfloat16", "w8a8")
STANDARD_OUTPUT = "-"
TRANSPORTS = ("auto", "torch", "local")
CHECKS = ("auto", "signature", "sampled", "off")
LIMITS = {"world": 1 << 20, "ids": 1 << 16}


class FlagError(ValueError):
    """Wrong flags: every rank has the same command line, so one of them says it for all."""


class FlagParser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print and end: under torchrun only one rank is to speak."""

    def error(self, message: str) -> NoReturn:
        raise FlagError(f"{message} (see {self.prog} --help)")


@dataclass(frozen=True)
class DeviceChoice:
    """A kind of device and, if the user listed them, the ids of the local ranks in order."""

    kind: str = "cpu"
    ids: tuple[int, ...] | None = None

    def of(self, local_rank: int) -> str:
        """The device of a local rank: cpu, or kind:id where the id is listed or the local rank itself."""
        if self.kind == "cpu":
            return "cpu"
        if self.ids is None:
            return f"{self.kind}:{local_rank}"
        if local_rank >= len(self.ids):
            raise ValueError(
                f"--device {self} lists {len(self.ids)} ids, but local rank {local_rank} needs id number "
                f"{local_rank + 1}; list one distinct id for each local rank"
            )
        return f"{self.kind}:{self.ids[local_rank]}"

    def check(self, local_ranks: int) -> None:
        """ValueError naming the first local rank that has no id of its own."""
        for local_rank in range(local_ranks):
            self.of(local_rank)

    def __str__(self) -> str:
        return self.kind if self.ids is None else f"{self.kind}:{','.join(map(str, self.ids))}"


@dataclass(frozen=True)
class RunFlags:
    """The common flags, resolved. json: None, "-" for standard output, or a file."""

    topology: Topology
    backend: str
    device: DeviceChoice
    timeout: float
    numerics: str
    seed: int
    json: str | None = None
    transport: str = "auto"
    check: str = "auto"
    control: Path | None = None
    record: str | None = None
    trace: str | None = None

    def facts(self) -> dict[str, str | int | float]:
        """What must be equal on all ranks."""
        sizes = asdict(self.topology)
        return {
            **sizes,
            "backend": self.backend,
            "device": self.device.kind,
            "timeout": self.timeout,
            "numerics": self.numerics,
            "seed": self.seed,
            "transport": self.transport,
            "check": self.check,
            "record and trace": f"{self.record is not None} {self.trace is not None}",
        }


COMMON: dict[str, dict[str, Any]] = {
    "ranks": {"type": int, "help": "ranks to start here; not under torchrun (default: --ep, --tp or 1)"},
    "tp": {"type": int, "help": "ranks of a tensor and context group (default: 1)"},
    "ep": {"type": int, "help": "ranks of an expert group (default: all)"},
    "backend": {"choices": sorted(BACKENDS.values()), "help": "default: the device's own"},
    "device": {"default": "cpu", "help": "cpu, cuda or npu, with ids if wanted: cuda:0,1"},
    "timeout": {"type": float, "default": 60.0, "help": "seconds that a rank waits for another (default: %(default)s)"},
    "transport": {
        "default": "auto",
        "choices": TRANSPORTS,
        "help": "how CPU ranks of one host move rows: shared memory (local) or gloo (torch) (default: %(default)s)",
    },
    "check": {
        "default": "auto",
        "choices": CHECKS,
        "help": "compare every call between ranks before data moves, or one in 64; off leaves a mistake to the "
        "backend, which may abort or return wrong sums (default: signature on one host's CPUs, else sampled)",
    },
    "control": {
        "type": Path,
        "metavar": "DIR",
        "help": "folder of the control pages, for `meshspark diagnose` (default: a private temporary one)",
    },
    "record": {"metavar": "FILE", "help": "write the run's exchanges to FILE, for `meshspark bench replay`"},
    "trace": {"metavar": "DIR", "help": "write a timeline of stages and exchanges that Perfetto opens to DIR"},
    "numerics": {"default": "float32", "choices": NUMERICS, "help": "dtypes (default: %(default)s)"},
    "seed": {"type": int, "default": 0, "help": "seed of everything random (default: %(default)s)"},
    "json": {
        "nargs": "?",
        "const": STANDARD_OUTPUT,
        "metavar": "FILE",
        "help": "write JSON to FILE, or to standard output and the tables to standard error",
    },
}
"""Common flag -> what argparse needs to know of it."""


ALONE = ("transport", "check", "control", "record", "trace")
"""Common flags that a verb of one process could only ignore."""


def add_common(parser: argparse.ArgumentParser, leave_out: Sequence[str] = ()) -> None:
    """Add the common flags to a parser, but for those that would have no effect there; these keep their defaults."""
    group = parser.add_argument_group("common flags")
    for name, options in COMMON.items():
        if name in leave_out:
            parser.set_defaults(**{name: options.get("default")})
        else:
            group.add_argument(f"--{name}", **options)


def resolve(
    args: argparse.Namespace, world_size: int | None = None, local_ranks: int | None = None, rank: int | None = None
) -> RunFlags:
    """The run that the flags ask for; world_size, local_ranks and rank are torchrun's, None where it did not start us.

    ValueError naming the equation, the values and what is legal.
    """
    topology = resolve_topology(args.ranks, args.tp, args.ep, world_size)
    device = parse_device(args.device)
    device.check(topology.world if local_ranks is None else local_ranks)
    if not 0 < args.timeout < 1e9:
        raise ValueError(f"--timeout is {args.timeout}, allowed: seconds above 0")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed is {args.seed}, allowed: 0 to 2**63 - 1")
    own = BACKENDS[device.kind]
    if args.backend not in (None, own):
        raise ValueError(f"--backend is {args.backend}, but --device {device} moves its rows with {own}")
    # The file is rank 0's; the folder need not exist on the other machines.
    if rank == 0 or world_size is None:
        check_json(args.json)
        check_json(args.record, "--record")
    if args.transport == "local" and device.kind != "cpu":
        raise ValueError(f"--transport is local, which moves CPU rows, but --device is {device}")
    if args.control is not None and args.control.exists() and not args.control.is_dir():
        raise ValueError(f"--control is {args.control}, allowed: a folder, or one that can be made")
    return RunFlags(
        topology,
        own,
        device,
        args.timeout,
        args.numerics,
        args.seed,
        args.json,
        args.transport,
        args.check,
        args.control,
        args.record,
        args.trace,
    )


def check_json(target: str | None, flag: str = "--json") -> None:
    """ValueError where the file of --json or --record could not be written. Makes and changes nothing."""
    if target is None or target == STANDARD_OUTPUT:
        return
    path = Path(target)
    try:
        folder = path.resolve().parent
        if path.is_dir():
            problem = "is a folder"
        elif path.exists():
            problem = "" if os.access(path, os.W_OK) else "may not be written"
        elif not folder.is_dir():
            problem = f"cannot be made, for the folder {folder} does not exist"
        else:
            problem = "" if os.access(folder, os.W_OK | os.X_OK) else f"cannot be made, for {folder} may not be written"
    except (OSError, RuntimeError) as unusual:
        problem = f"cannot be looked at: {unusual}"
    if problem:
        raise ValueError(
            f"{flag} is {target!r}, which {problem}; allowed: a file in a folder that exists and may be written, or "
            f"nothing (or {STANDARD_OUTPUT}) for standard output"
        )


def check_range(flag: str, value: float, least: float, most: float) -> None:
    """FlagError unless least <= value <= most; not a number is refused too."""
    if not least <= value <= most:
        raise FlagError(f"{flag} is {value}, allowed: {least:,} to {most:,}")


def require_alone(flags: RunFlags, verb: str) -> None:
    """FlagError naming the common flag that a verb of one process on the CPU, in float32, could only ignore."""
    given: dict[str, object] = {"ranks (world)": flags.topology.world, "device": str(flags.device)}
    given |= {"timeout": flags.timeout, "numerics": flags.numerics}
    alone: dict[str, object] = {"ranks (world)": 1, "device": "cpu"}
    alone |= {name: COMMON[name]["default"] for name in ("timeout", "numerics")}
    for name, value in given.items():
        if value != alone[name]:
            raise FlagError(
                f"--{name} is {value}, but {verb} is one process on the CPU that computes in float32 and waits for no "
                f"other; allowed: {alone[name]}"
            )


def resolve_topology(ranks: int | None, tp: int | None, ep: int | None, world_size: int | None = None) -> Topology:
    """ranks = world_size under torchrun, else --ranks, else --ep, else --tp, else 1; ep defaults to ranks, tp to 1."""
    for name, value in (("--ranks", ranks), ("--tp", tp), ("--ep", ep)):
        if value is not None and not 1 <= value <= LIMITS["world"]:
            raise ValueError(f"{name} is {value}, allowed: a whole number from 1")
    if world_size is not None and ranks is not None:
        raise ValueError(
            f"--ranks is {ranks}, but torchrun has started {world_size} ranks already (WORLD_SIZE); "
            "leave --ranks out, or start without torchrun"
        )
    world = next(n for n in (world_size, ranks, ep, tp, 1) if n is not None)
    return Topology(world, 1 if tp is None else tp, world if ep is None else ep)


def parse_device(text: str) -> DeviceChoice:
    """cpu, cuda, npu, or one of the latter with ids: cuda:0,1."""
    kind, colon, listed = text.partition(":")
    if kind not in BACKENDS:
        raise ValueError(f"--device is {text!r}, allowed: {', '.join(BACKENDS)}, with ids such as cuda:0,1")
    if not colon:
        return DeviceChoice(kind)
    if kind == "cpu":
        raise ValueError(f"--device is {text!r}, but cpu takes no ids")
    pieces = listed.split(",")
    if not all(p.isascii() and p.isdecimal() and int(p) < LIMITS["ids"] for p in pieces):
        raise ValueError(f"--device is {text!r}, allowed after the colon: ids such as 0,1")
    ids = tuple(int(p) for p in pieces)
    for local_rank, number in enumerate(ids):
        first = ids.index(number)
        if first < local_rank:
            raise ValueError(
                f"--device {text} gives id {number} to local rank {first} and again to local rank {local_rank}; "
                "list one distinct id for each local rank"
            )
    return DeviceChoice(kind, ids)


def without_ranks(argv: Sequence[str]) -> list[str]:
    """The command line for ranks that know their number from the environment."""
    kept: list[str] = []
    skip = False
    for argument in argv:
        if not skip and argument != "--ranks" and not argument.startswith("--ranks="):
            kept.append(argument)
        skip = argument == "--ranks"
    return kept
