"""Jobs that tests start as ranks: `python -m launch_jobs KIND [flags]`, directly, by the launcher or by torchrun."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from meshspark.comm.collectives import all_gather_rows
from meshspark.launch.flags import FlagParser, add_common
from meshspark.launch.spawn import run_job
from meshspark.launch.worker import named_stage, read_place, resolve_here, run_main


def _act(argv):
    parser = FlagParser(prog="launch_jobs", allow_abbrev=False)
    parser.add_argument("kind")
    parser.add_argument("--pids", type=Path)
    parser.add_argument("--tokens", type=int, default=8)
    add_common(parser)
    args = parser.parse_args(argv)
    place = read_place()
    flags = resolve_here(args)
    facts = {"place": place.rank} if args.kind == "differ" and place else {}
    return run_job("launch_jobs", argv, flags, lambda groups: _job(groups, args), facts)


def _job(groups, args):
    if args.pids:
        (args.pids / str(groups.rank)).write_text(str(os.getpid()))
    gathered = all_gather_rows(torch.full((1, 2), groups.rank), groups.world, stage="fine")
    last = groups.rank == groups.topology.world - 1
    if groups.rank == 0:
        print(f"rows {gathered[:, 0].tolist()} tp {groups.topology.tp} ep {groups.topology.ep}", flush=True)
    if args.kind == "write":
        _write(groups, args.tokens)
    if args.kind == "raise" and last:
        with named_stage("brew"):
            raise ValueError("no more tea")
    if args.kind == "leave" and last:
        sys.exit(7)
    if args.kind == "die" and last:
        os.kill(os.getpid(), signal.SIGKILL)
    if args.kind == "leave-first" and groups.rank == 0:
        sys.exit(7)
    if args.kind in ("raise", "leave", "leave-first", "die"):
        all_gather_rows(torch.zeros(1, 2), groups.world, stage="wait")
    if args.kind == "loop":
        while True:
            all_gather_rows(torch.zeros(1, 2), groups.world, stage="loop")
            time.sleep(0.05)


def _write(groups, tokens):
    """A greedy and a sampled request; rank 0 prints their ids and a digest of every rank's caches at the end."""
    # Not at the top: the other kinds start quicker without the model.
    from episodes import make_model

    from meshspark.launch.engine import Engine
    from meshspark.models.request import SamplingParams

    engine = Engine(make_model(groups, "tiny", "float32"), requests=2 * groups.topology.tp, max_context=128)
    ids: dict[int, list[int]] = {}
    if groups.rank == 0:
        ids[engine.add_request([5, 9, 200], SamplingParams(tokens))] = []
        ids[engine.add_request([7, 7, 8], SamplingParams(tokens, 0.9, 0.95, seed=3))] = []
        while engine.active:
            for event in engine.step():
                ids[event.request_id] += event.token_ids
        engine.close()
    else:
        engine.serve()
    digest = hashlib.sha256()
    for pool in engine.caches.pools.values():
        digest.update(pool.numpy().tobytes())
    mine = torch.tensor([list(digest.digest())], dtype=torch.uint8)
    digests = all_gather_rows(mine, groups.world, stage="digests")
    if groups.rank == 0:
        print(json.dumps({"ids": list(ids.values()), "caches": digests.tolist()}), flush=True)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(run_main("launch_jobs", lambda _: _act(arguments), arguments))
