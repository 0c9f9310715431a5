"""One rank of a job: the environment becomes a place, groups and an exit code. Alone reads the environment."""

import argparse
import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .ending import Ending, ToldToEnd
from .flags import FlagError, RunFlags, resolve
from .joining import job_folder, join, let_go_on

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""

RUN_ID = "meshspark-local-"
"""Marks jobs that `spawn` started: there the launcher speaks for all ranks."""

STAGE_NOTE = "stage: "

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

SHOWN = (
    *RANK_VARIABLES,
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_BUFFSIZE",
    "NCCL_DEBUG",
    "HCCL_SOCKET_IFNAME",
    "HCCL_BUFFSIZE",
    "HCCL_EXEC_TIMEOUT",
    "HCCL_CONNECT_TIMEOUT",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_DISTRIBUTED_DEBUG",
)
"""The variables that matter to a run; no other one is ever shown."""


@dataclass(frozen=True)
class Place:
    """Where this process stands. managed: an elastic launcher is the parent; spoken_for: it is our own."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    managed: bool = False
    spoken_for: bool = False
    error_file: str | None = None


def read_place(environ: Mapping[str, str] | None = None) -> Place | None:
    """The place that torchrun's variables give, None without them. ValueError names a missing or wrong one."""
    env = os.environ if environ is None else environ
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE", least=1)
    if rank >= world:
        raise ValueError(f"RANK is {rank}, allowed: 0 to {world - 1}, for WORLD_SIZE is {world}")
    local_rank = _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env or world > 1 else 0
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if world > 1 and name not in env:
            raise ValueError(
                f"WORLD_SIZE is {world}, but {name} is not set: torchrun sets it (over several machines give it "
                "--rdzv-endpoint HOST:PORT); ranks started by hand need the address and port of rank 0's machine"
            )
    run_id = env.get("TORCHELASTIC_RUN_ID")
    local_world = _number(env, "LOCAL_WORLD_SIZE", least=1) if "LOCAL_WORLD_SIZE" in env else local_rank + 1
    ours = run_id is not None and run_id.startswith(RUN_ID)
    return Place(rank, world, local_rank, local_world, run_id is not None, ours, env.get("TORCHELASTIC_ERROR_FILE"))


def resolve_here(args: argparse.Namespace) -> RunFlags:
    """The common flags as they hold for the place of this process. ValueError as `read_place`, FlagError else."""
    place = read_place()
    try:
        return resolve(args, *((place.world, place.local_world, place.rank) if place else (None, None, 0)))
    except ValueError as problem:
        raise FlagError(str(problem)) from problem


def _number(env: Mapping[str, str], name: str, least: int = 0) -> int:
    value = env.get(name)
    if value is None:
        raise ValueError(f"{name} is not set, though RANK or WORLD_SIZE is: start with torchrun, or set all of them")
    if not (value.isascii() and value.isdecimal() and int(value) >= least):
        raise ValueError(f"{name} is {value!r}, allowed: a whole number from {least}")
    return int(value)


def shown_environment() -> dict[str, str]:
    """The variables of SHOWN that are set."""
    return {name: os.environ[name] for name in SHOWN if name in os.environ}


def unranked_environment() -> dict[str, str]:
    """The environment of a process that starts a job of its own, also below torchrun."""
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}


@contextmanager
def environment_for_ranks(ranks: int, loopback: str | None) -> Iterator[None]:
    """What local ranks shall inherit, while the body runs; variables that the user has set stay."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // ranks))}
    # Off, torch's launcher opens no network store of its own; ranks started here meet in a file.
    defaults["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if loopback is not None:
        defaults["GLOO_SOCKET_IFNAME"] = loopback
    before = dict(os.environ)
    try:
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def named_stage(name: str, inner: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """An exception of the body remembers the stage: what `inner` says at that moment, else this name."""
    try:
        yield
    except Exception as problem:
        if stage_of(problem) is None:
            problem.add_note(f"{STAGE_NOTE}{inner() or name}")
        raise


def stage_of(problem: BaseException) -> str | None:
    """The stage that an exchange's error carries, or that `named_stage` noted."""
    own = getattr(problem, "stage", None)
    if isinstance(own, str) and own:
        return own
    notes = [n for n in getattr(problem, "__notes__", ()) if n.startswith(STAGE_NOTE)]
    return notes[0].removeprefix(STAGE_NOTE) if notes else None


def config_facts(directory: Path) -> dict[str, str]:
    """A hash of config.json, so that ranks which read different checkpoints say so before they load."""
    path = directory / "config.json"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "(missing)"
    return {"config.json": digest}


def check_machine(flags: RunFlags, local_ranks: int) -> None:
    """ValueError naming the first local rank whose device is not there, or a variable with a useless value."""
    from ..comm.backend import check_environment

    check_environment(flags.backend, os.environ)
    if flags.device.kind == "cpu":
        return
    present = device_count(flags.device.kind)
    for local_rank in range(local_ranks):
        device = flags.device.of(local_rank)
        if int(device.partition(":")[2]) >= present:
            raise ValueError(
                f"--device {flags.device}: local rank {local_rank} would use {device}, "
                f"but this process sees {present} {flags.device.kind} devices"
            )


def device_count(kind: str) -> int:
    """How many devices of a kind torch sees in this process."""
    import torch

    module = getattr(torch, kind, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def run_rank(
    place: Place, flags: RunFlags, job: Callable[[Any], None], facts: Mapping[str, str | int | float] | None = None
) -> int:
    """Start this rank's groups, run job(groups), end them; the exit code.

    A failure is told once: by the launcher if it is ours, else here with rank and stage. It closes this rank's
    connections, so the other ranks end at once too. A rank of several that is told to end (SIGTERM), or whose launcher
    has gone, says so and ends with nothing left behind.
    """
    groups: Any = None
    ending = Ending(lambda problem: report(place, problem), job_folder(place))
    # Our own launcher speaks for its ranks, and tells by their exit codes who was killed from outside.
    ending.watch(parent=place.managed, signals=place.world > 1 and not place.spoken_for)
    try:
        with named_stage("start"):
            check_machine(flags, place.local_world)
            groups = join(place, flags, {**flags.facts(), **(facts or {})}, os.environ, ending.knows)
        with named_stage("run"):
            job(groups)
            _finish(groups, flags)
    except (SystemExit, BrokenPipeError, KeyboardInterrupt):
        # Not closed, the groups' threads would abort this process on its way out. A reader that has gone is no fault.
        if groups is not None:
            groups.close()
        raise
    except Exception as problem:
        ending.ends_itself()
        report(place, problem)
        if groups is not None:
            let_go_on(groups, problem)
            with suppress(Exception):
                _salvage(groups, flags)
            with suppress(Exception):
                groups.close()
        return _leave(place, FAILED)
    groups.close()
    return _leave(place, OK)


def _finish(groups: Any, flags: RunFlags) -> None:
    """What --record and --trace ask for."""
    if flags.record is not None or flags.trace is not None:
        from ..comm.trace import finish

        finish(groups, flags.record, flags.trace)


def _salvage(groups: Any, flags: RunFlags) -> None:
    if flags.trace is not None:
        from ..comm.trace import salvage

        salvage(groups, flags.trace)


def _leave(place: Place, code: int) -> int:
    """The exit code; a process that is one rank of several ends here instead.

    Its groups are closed and its output is flushed: nothing is left to do, and the backends' threads may abort an
    interpreter that takes itself apart around them.
    """
    if place.world > 1:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


def report(place: Place, problem: BaseException, *, usage: bool = False) -> None:
    """Leave the failure where an elastic launcher looks for it, and print it unless that launcher is ours.

    What all ranks find alike (wrong flags, a faulty checkpoint, differing ranks) is printed by rank 0 alone; what one
    machine may find alone (a file that is not there) by every rank that finds it.
    """
    text = failure_text(place, problem, usage=usage)
    if place.error_file:
        with suppress(OSError):
            _write_error_file(Path(place.error_file), text, problem)
    if not place.spoken_for and (place.rank == 0 or not _is_joint(problem)):
        print(f"meshspark: {text}", file=sys.stderr, flush=True)
        if not _is_expected(problem):
            traceback.print_exception(problem)


def failure_text(place: Place, problem: BaseException, *, usage: bool = False) -> str:
    """One line of who failed, where, and how."""
    if usage or type(problem).__name__ in ("FixtureFailed", "RequestFailed"):
        return str(problem)
    if isinstance(problem, ToldToEnd):
        return f"rank {place.rank} ended: {problem}"
    kind = "" if _is_joint(problem) else f"{type(problem).__name__}: "
    return f"rank {place.rank} failed in stage {stage_of(problem) or '?'}: {kind}{problem}"


def _is_joint(problem: BaseException) -> bool:
    return type(problem).__name__ in ("CheckpointError", "CollectiveMismatch", "FixtureFailed", "FlagError")


def _is_expected(problem: BaseException) -> bool:
    from ..parallel.errors import CommError

    return isinstance(problem, ValueError | CommError | ToldToEnd)


def _write_error_file(path: Path, text: str, problem: BaseException) -> None:
    """In the form that torch's launcher reads, with a finer time and the kind of the error."""
    now = time.time()
    stack = "".join(traceback.format_exception(problem))
    extra = {"py_callstack": stack, "timestamp": str(int(now)), "time": now, "secondary": is_secondary(problem)}
    extra["expected"] = _is_expected(problem)
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
    temporary.replace(path)


def is_secondary(problem: BaseException) -> bool:
    """Whether the error only tells that something happened to another rank."""
    from ..parallel.errors import CollectiveMismatch, CommError

    return isinstance(problem, CommError) and not isinstance(problem, CollectiveMismatch)


def run_main(name: str, act: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None) -> int:
    """act(argv) as a verb's main: a ValueError before the ranks start is one message and exit code 2."""
    try:
        return act(argv)
    except ValueError as problem:
        place = _place_or_alone()
        where = f"{name}: rank {place.rank}" if place.rank else name
        report(place, type(problem)(f"{where}: {problem}"), usage=True)
        return USAGE
    except KeyboardInterrupt:
        if not _place_or_alone().spoken_for:
            print("meshspark: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; Python's own flush at exit would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _place_or_alone() -> Place:
    try:
        return read_place() or Place()
    except ValueError:
        return Place()
