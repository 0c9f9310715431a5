"""`meshspark features`: run a target over samples and keep what a drafter is trained on, its size stated first.

Captured layers and the state that enters the LM head, in BF16, of every token: a folder of safetensors shards and
features.msgpack, for `meshspark train-drafter --features`.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ..comm.agreement import agree
from ..models.checkpoint.verify import read_config
from ..models.drafts.config import DraftConfig
from ..models.drafts.config import read_config as read_draft_config
from ..models.training.capture import TargetCapture
from ..models.training.feature_files import (
    INDEX_NAME,
    SHARD_BYTES,
    FeaturePlan,
    Shard,
    ShardWriter,
    plan_features,
    token_bytes,
    write_index,
)
from ..models.training.feature_spec import POINTS, STREAMS, FeatureSpec, draft_features
from ..models.training.token_files import TokenFiles
from ..models.v4.config import V4Config
from ..parallel.groups import Groups
from .exchange import try_exchanges
from .flags import FlagError, FlagParser, RunFlags, add_common, check_range
from .generate import SAMPLE, load_model, require_checkpoint
from .output import people, write_json
from .spawn import run_job
from .worker import config_facts, named_stage, read_place, resolve_here, run_main

MODULE = "meshspark.launch.features"
TELL_SECONDS = 10.0
MOST_ROWS = 1 << 24


@dataclass(frozen=True)
class Task:
    """What to capture and where it will lie. rows: tokens of a TP group in one forward, one sample may exceed them."""

    directory: Path
    data: TokenFiles
    plan: FeaturePlan
    out: Path
    rows: int

    def facts(self) -> dict[str, str | int | float]:
        """What must be equal on all ranks."""
        return {
            **config_facts(self.directory),
            "data": self.data.digest,
            "features": repr(self.plan.spec),
            "rows": self.rows,
        }


def parser() -> FlagParser:
    """The verb's flags."""
    flags = FlagParser(prog="meshspark features", description=__doc__, allow_abbrev=False)
    flags.add_argument("--checkpoint", type=Path, default=SAMPLE, metavar="DIR", help="target (default: the sample)")
    flags.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of *.jsonl with token ids")
    flags.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to be made, seen by all ranks")
    flags.add_argument("--config", type=Path, metavar="FILE", help="a draft's config: what it reads is captured")
    flags.add_argument("--layers", metavar="N,N,...", help="captured layers in order, without --config")
    flags.add_argument("--point", choices=POINTS, help="which states of a layer (default: mean_out)")
    flags.add_argument(
        "--without-teacher", action="store_true", help="leave out the state that enters the LM head: for CE alone"
    )
    flags.add_argument("--rows", type=int, default=4096, metavar="N", help="tokens of a TP group at once (4096)")
    flags.add_argument("--size-only", action="store_true", help="say what it would take, and write nothing")
    add_common(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 for a failure, 2 for wrong flags or data, 130 for an interrupt."""
    return run_main("features", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    flags = resolve_here(args)
    task = prepare(args, flags)
    if args.size_only:
        state_size(task, people(flags.json))
        write_json(flags.json, figures(task, written=False))
        return 0
    place = read_place()
    if place is None or place.rank == 0:
        # The other ranks may come by when this one has begun to write.
        check_room(task)
    return run_job(MODULE, arguments, flags, lambda groups: run(groups, task, flags), task.facts())


def prepare(args: argparse.Namespace, flags: RunFlags) -> Task:
    """Check everything that can be checked before a rank starts. ValueError."""
    require_checkpoint(args.checkpoint)
    config = read_config(args.checkpoint)
    flags.topology.check_model(config.o_groups, config.vocab_size, config.n_routed_experts)
    check_range("--rows", args.rows, 1, MOST_ROWS)
    spec = wanted_features(args, config)
    spec.check_target(config.num_hidden_layers, config.hidden_size, config.vocab_size, config.hc_mult)
    data = TokenFiles(args.data, config.vocab_size, config.max_position_embeddings)
    target = config_facts(args.checkpoint)["config.json"]
    # At least a shard for every TP group, which writes its own.
    share = -(-sum(data.lengths) * token_bytes(spec) // flags.topology.dp)
    plan = plan_features(spec, data.lengths, target=target, data=data.digest, shard_bytes=min(SHARD_BYTES, share))
    return Task(args.checkpoint, data, plan, args.out, args.rows)


def wanted_features(args: argparse.Namespace, config: V4Config) -> FeatureSpec:
    """The features that the flags ask for. ValueError."""
    teacher = not args.without_teacher
    if args.config is not None:
        if args.layers is not None or args.point is not None:
            raise FlagError("--config says which layers and point; give it, or --layers and --point")
        draft: DraftConfig = read_draft_config(args.config)
        return draft_features(draft, teacher)
    if args.layers is None:
        raise FlagError("what to capture is not said; give --config FILE or --layers N,N,...")
    pieces = args.layers.split(",")
    if not all(p.isascii() and p.isdecimal() and len(p) < 10 for p in pieces):
        raise FlagError(f"--layers is {args.layers!r}, allowed: numbers such as 40,41,42")
    layers = tuple(int(p) for p in pieces)
    point = args.point or POINTS[0]
    streams = config.hc_mult if point == STREAMS else 1
    return FeatureSpec(layers, point, config.hidden_size, config.vocab_size, teacher, streams=streams)


def check_room(task: Task) -> None:
    """FlagError where the folder holds something already, or its disk too little room."""
    out = task.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FlagError(f"--out is {str(out)!r}, which holds something; allowed: a new or an empty folder")
    place = next(parent for parent in (out, *out.resolve().parents) if parent.is_dir())
    free = shutil.disk_usage(place).free
    if task.plan.num_bytes > free:
        raise FlagError(f"--out needs {task.plan.num_bytes:,} bytes, and the disk of {place} has {free:,} free")


def figures(task: Task, *, written: bool) -> dict[str, object]:
    """The result for --json, but for its schema."""
    return {
        "folder": str(task.out),
        "written": written,
        "samples": len(task.data),
        "tokens": task.plan.tokens,
        "bytes": task.plan.num_bytes,
        "shards": len(task.plan.shards),
        **task.plan.spec.to_dict(),
    }


def state_size(task: Task, out: TextIO) -> None:
    """One line of what will be written."""
    plan, spec = task.plan, task.plan.spec
    print(
        f"{task.out}: {plan.num_bytes:,} bytes for {plan.tokens:,} tokens of {len(task.data):,} samples: layers "
        f"{','.join(map(str, spec.layers))} at {spec.point}, {'with' if spec.teacher else 'without'} the head's state, "
        f"{len(plan.shards)} shards",
        file=out,
        flush=True,
    )


def run(groups: Groups, task: Task, flags: RunFlags) -> None:
    """One rank's part: load, capture its TP group's shards, and on world rank 0 tell."""
    out = people(flags.json)
    if groups.rank == 0:
        state_size(task, out)
    if groups.topology.world > 1:
        try_exchanges(groups)
    with named_stage("load"):
        model = load_model(groups, task.directory, flags)
    with named_stage("capture", lambda: model.clock.current):
        write_features(TargetCapture(model, task.plan.spec), task, out if groups.rank == 0 else None)
    if groups.rank == 0:
        write_json(flags.json, figures(task, written=True))
        print(f"{task.out / INDEX_NAME}: {task.plan.tokens:,} tokens", file=out)


def write_features(capture: TargetCapture, task: Task, out: TextIO | None) -> None:
    """Every TP group writes its shards, world rank 0 the index once all are whole. All ranks call it; `out` gets
    progress."""
    groups, plan = capture.model.groups, task.plan
    place, dp = groups.topology.coordinates(groups.rank), groups.topology.dp
    rounds = [list(_batches(plan.shards[dp_rank::dp], task.rows)) for dp_rank in range(dp)]
    writer = _Writer(task, place.tp_rank == 0)
    begin, told, done = time.perf_counter(), time.perf_counter(), 0
    task.out.mkdir(parents=True, exist_ok=True)
    try:
        for number in range(max(map(len, rounds))):
            samples = rounds[place.dp_rank][number] if number < len(rounds[place.dp_rank]) else []
            writer.take(samples, capture)
            done += sum(task.data.lengths[i] for _, i in samples)
            now = time.perf_counter()
            if out is not None and now - told >= TELL_SECONDS:
                share = (number + 1) / len(rounds[0]) if rounds[0] else 1.0
                print(f"{min(1.0, share):.0%}, {done / (now - begin):.0f} tokens/s of TP group 0", file=out, flush=True)
                told = now
    except BaseException:
        writer.drop()
        raise
    # Nobody's shard is missing when the index says that all are there.
    agree([1], groups, stage="features")
    if groups.rank == 0:
        write_index(task.out, plan)


def _batches(shards: Sequence[Shard], rows: int) -> Iterator[list[tuple[Shard, int]]]:
    """Samples, each with its shard, in order: as many at once as `rows` tokens hold, one at least."""
    batch: list[tuple[Shard, int]] = []
    tokens = 0
    for shard in shards:
        for i, length in enumerate(shard.lengths):
            if batch and tokens + length > rows:
                yield batch
                batch, tokens = [], 0
            batch.append((shard, shard.first + i))
            tokens += length
    if batch:
        yield batch


class _Writer:
    """Shards of a TP group, one after the other; only tp_rank 0 writes, the others take part in the forward."""

    def __init__(self, task: Task, writes: bool) -> None:
        self._task, self._writes = task, writes
        self._shard: Shard | None = None
        self._file: ShardWriter | None = None

    def take(self, samples: Sequence[tuple[Shard, int]], capture: TargetCapture) -> None:
        """Capture samples and write what is this rank's."""
        data = self._task.data
        tokens = [data[i] for _, i in samples]
        found = capture.run([each.input_ids.tolist() for each in tokens])
        if not self._writes:
            return
        for place, ((shard, index), sample) in enumerate(zip(samples, tokens, strict=True)):
            if self._shard is not shard:
                self._shard = shard
                self._file = ShardWriter(self._task.out, self._task.plan.spec, shard)
            assert self._file is not None
            self._file.add(sample, found[place])
            if index == shard.first + len(shard.lengths) - 1:
                self._file.close()
                self._file = None

    def drop(self) -> None:
        """Leave no half of a shard."""
        if self._file is not None:
            self._file.drop()


if __name__ == "__main__":
    sys.exit(main())
