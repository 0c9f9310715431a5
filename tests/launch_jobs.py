"""Jobs that tests start as ranks: `python -m launch_jobs KIND [flags]`, directly, by the launcher or by torchrun."""

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
    if args.kind == "raise" and last:
        with named_stage("brew"):
            raise ValueError("no more tea")
    if args.kind == "leave" and last:
        sys.exit(7)
    if args.kind == "die" and last:
        os.kill(os.getpid(), signal.SIGKILL)
    if args.kind in ("raise", "leave", "die"):
        all_gather_rows(torch.zeros(1, 2), groups.world, stage="wait")
    if args.kind == "loop":
        while True:
            all_gather_rows(torch.zeros(1, 2), groups.world, stage="loop")
            time.sleep(0.05)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(run_main("launch_jobs", lambda _: _act(arguments), arguments))
