"""Who takes part in the decode and prefill benchmarks: our models and the peers, all with the same random weights."""

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..launch.flags import FlagError, FlagParser, RunFlags, add_common, check_range
from ..models.numerics import BFLOAT16, MODES, Numerics
from ..models.v4.config import V4Config
from ..models.v4.model import Model
from ..models.v4.sizing import held_weights
from ..parallel.groups import Groups
from ..parallel.topology import Topology
from .context_steps import free_bytes
from .limits import Work
from .peer import peer_model
from .report import check_target, plotting
from .rounds import Load, Rounds, Row, Side, make_row
from .slice import LAYERS, convert, slice_weights

NAMES = tuple(name for name in MODES if name != "float64")
MARGIN_BYTES = 3 << 30
"""Room for what steps and their measuring take."""

MOST = 16
"""Numbers of a list at most."""


@dataclass(frozen=True)
class Contest:
    """Our models by numerics and the peers by dtype, over the same weights."""

    config: V4Config
    models: Mapping[str, Model]
    peers: Mapping[str, torch.nn.Module]


def peer_name(numerics: str) -> str:
    """The dtype of the peer that a numerics is held against."""
    return "float32" if numerics == "float32" else "bfloat16"


def peers_of(names: Sequence[str], build: Callable[[torch.dtype], torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """A peer for each dtype that the numerics need. ValueError where transformers is not installed."""
    try:
        return {name: build(getattr(torch, name)) for name in dict.fromkeys(map(peer_name, names))}
    except ImportError as problem:
        raise ValueError(f"the peer needs transformers ({problem}); pip install 'meshspark[test]'") from problem


def make_contest(config: V4Config, names: Sequence[str], seed: int) -> Contest:
    """Draw the weights once, and build everybody from them. ValueError where the memory or transformers is missing."""
    needed, free = needed_bytes(config, names), free_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"weights in {', '.join(names)} and for the peer take about {needed:,} bytes of memory, free are {free:,}; "
            "give one --numerics or fewer --layers"
        )
    weights = slice_weights(config, seed)
    peers = peers_of(names, lambda dtype: peer_model(config, weights, dtype))
    models = {
        name: Model(config, convert(weights, config, MODES[name]), Groups.single(), MODES[name]) for name in names
    }
    gc.collect()
    return Contest(config, models, peers)


def needed_bytes(config: V4Config, names: Sequence[str]) -> int:
    """The drawn weights, which BF16 and its peer share; codes and what is packed of them; FP32 ones of both sides."""
    total = _weight_bytes(config, BFLOAT16) + MARGIN_BYTES
    for name in names:
        total += 0 if name == BFLOAT16.name else 2 * _weight_bytes(config, MODES[name])
    return total


def _weight_bytes(config: V4Config, numerics: Numerics) -> int:
    return sum(each.num_bytes for each in held_weights(config, Topology(), numerics).values())


class Ours(Protocol):
    """What a side of ours runs in a turn. steps: those of a turn; work: least work of each, known once it has run."""

    model: Model
    steps: int

    def run(self) -> torch.Tensor: ...

    def work(self) -> Work: ...


def our_rows(load: Load, ours: Mapping[Side, Ours], found: Rounds, stages: bool) -> list[Row]:
    """A row of each side of ours against its peer; with stages one more run of each, under the clock."""
    rows = []
    for side, one in ours.items():
        peer, numerics = Side(peer_name(side.numerics), side.context, peer=True), MODES[side.numerics]
        by_stage = stages_ms(one.model, one.run, one.steps) if stages else None
        error = found.error(side, peer)
        rows.append(make_row(load, side, peer, found, numerics, one.work(), error=error, stages_ms=by_stage))
    return rows


def stages_ms(model: Model, run: Callable[[], object], steps: int) -> dict[str, float]:
    """Milliseconds of a step by stage, of one more run under the model's clock."""
    model.clock.seconds.clear()
    model.clock.enabled = True
    try:
        run()
    finally:
        model.clock.enabled = False
    return {name: 1000 * seconds / steps for name, seconds in model.clock.seconds.items()}


def add_flags(flags: FlagParser, cases: Sequence[str], rounds: int) -> None:
    """The flags that both benchmarks have; `cases` in the order in which they run, those of the default first."""
    flags.add_argument("--case", metavar="NAME,...", help=f"of {', '.join(cases)} (default: all but tiny)")
    flags.add_argument(
        "--numerics", dest="modes", metavar="NAME,...", help=f"ours: of {', '.join(NAMES)} (default: the case's own)"
    )
    flags.add_argument("--layers", metavar="RATIO,...", default=",".join(map(str, LAYERS)), help="compression ratios")
    flags.add_argument("--rounds", type=int, default=rounds, help="counted rounds (default: %(default)s)")
    flags.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="CPU threads of both (default: all)"
    )
    flags.add_argument("--stages", action="store_true", help="one more run of ours, with its time by stage")
    flags.add_argument("--plot", metavar="FILE", help="step times as a picture (needs the extra plot)")
    left_out = ("ranks", "tp", "ep", "backend", "device", "timeout", "transport", "check", "control", "record", "trace")
    # The list of numerics is checked here; to the common flags one name is enough.
    add_common(flags, (*left_out, "numerics"))


def chosen(flag: str, text: str | None, allowed: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
    """The names of a list, each once, in the order given. FlagError."""
    if text is None:
        return tuple(default)
    names = text.split(",")
    if unknown := [name for name in names if name not in allowed]:
        raise FlagError(f"{flag} has {unknown[0]!r}, allowed: {', '.join(allowed)}, with commas between")
    return tuple(dict.fromkeys(names))


def numbers(flag: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """The whole numbers of a list, in the order given. FlagError."""
    parts = text.split(",")
    if len(parts) > MOST or not all(p.isascii() and p.isdecimal() and len(p) < 8 for p in parts):
        raise FlagError(f"{flag} is {text!r}, allowed: up to {MOST} whole numbers with commas between")
    for part in parts:
        check_range(flag, int(part), least, most)
    return tuple(map(int, parts))


def layers_of(text: str) -> tuple[int, ...]:
    """Compression ratios of --layers. FlagError."""
    layers = numbers("--layers", text, 0, 128)
    if any(ratio not in (0, 4, 128) for ratio in layers):
        raise FlagError(f"--layers is {text!r}, allowed: 0, 4 and 128 with commas between")
    return layers


def one_process(args: argparse.Namespace, flags: RunFlags, verb: str) -> None:
    """FlagError where torchrun started several ranks; rounds and threads in their limits, the picture's file too."""
    if flags.topology.world != 1:
        raise FlagError(f"{verb} is one process; start it without torchrun")
    check_range("--rounds", args.rounds, 1, 10_000)
    check_range("--threads", args.threads, 1, 1024)
    check_target("--plot", args.plot)
    if args.plot:
        plotting()
