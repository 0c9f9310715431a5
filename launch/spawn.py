"""N local ranks of a verb in one call, over torch's own elastic launcher."""

import json
import logging
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .flags import RunFlags, without_ranks
from .worker import (
    FAILED,
    INTERRUPTED,
    OK,
    RUN_ID,
    Place,
    check_machine,
    environment_for_ranks,
    read_place,
    run_rank,
)

SHUTDOWN_SECONDS = 3
MONITOR_SECONDS = 0.1
STDERR_TAIL = 4000


def run_job(
    module: str,
    argv: Sequence[str],
    flags: RunFlags,
    job: Callable[[Any], None],
    facts: Mapping[str, str | int | float] | None = None,
    *,
    stop_seconds: int | None = None,
) -> int:
    """Run job(groups) on every rank that the flags ask for; the exit code.

    Under torchrun, or for a single rank, this process is the rank. Otherwise the ranks are started here as
    `python -m module argv`, and each of them comes to this function again. stop_seconds: what ranks that are told to
    end are left for it, SHUTDOWN_SECONDS by default.
    """
    place = read_place()
    if place is None and flags.topology.world > 1:
        check_machine(flags, flags.topology.world)
        return run_local(module, without_ranks(argv), flags.topology.world, stop_seconds)
    return run_rank(place or Place(), flags, job, facts)


def run_local(module: str, argv: Sequence[str], ranks: int, stop_seconds: int | None = None) -> int:
    """`python -m module argv` on this many local ranks; the exit code.

    Rank 0's output streams through. The output of the others is shown only if they fail without a message of
    their own. The first failure ends all ranks and is told in one message; SIGINT and SIGTERM end them too.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with tempfile.TemporaryDirectory(prefix="meshspark-") as folder:
        try:
            with _signals_restored(), environment_for_ranks(ranks, loopback()):
                _launch(module, argv, ranks, folder, SHUTDOWN_SECONDS if stop_seconds is None else stop_seconds)
        except ChildFailedError as failure:
            codes = {rank: f.exitcode for rank, f in failure.failures.items()}
            text, code = _explain(codes, Path(folder), ranks)
            print(f"meshspark: {text}", file=sys.stderr, flush=True)
            return code
        except SignalException as caught:
            print(f"meshspark: {caught.sigval.name}: all {ranks} ranks ended", file=sys.stderr, flush=True)
            return INTERRUPTED if caught.sigval == signal.SIGINT else 128 + caught.sigval
    return OK


def _launch(module: str, argv: Sequence[str], ranks: int, folder: str, stop_seconds: int) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    quiet = dict.fromkeys(range(1, ranks), Std.ALL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"{RUN_ID}{uuid.uuid4().hex}",
        rdzv_backend="c10d",
        # A file in a folder of the user's alone: torch's network store would listen on every interface.
        rdzv_endpoint=str(Path(folder) / "launcher"),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
        shutdown_timeout=stop_seconds,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        logs_specs=DefaultLogsSpecs(log_dir=folder, redirects={0: Std.NONE, **quiet}),
    )
    _quieten()
    # -P: a file of the user's folder never stands in for a module.
    elastic_launch(config, sys.executable)("-P", "-m", module, *argv)


def _quieten() -> None:
    """The launcher's own log repeats, in many lines, what is said here in one. Each of its modules has a level."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def loopback() -> str | None:
    """The loopback interface's name: where a host's name leads elsewhere, gloo would leave the machine."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


@contextmanager
def _signals_restored() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(codes: Mapping[int, int], folder: Path, ranks: int = 0) -> tuple[str, int]:
    """(message, exit code) of a failed job: the root cause, not what followed from it.

    codes: exit codes by rank, in the order in which the launcher saw the ends. A killed rank comes first, then the
    earliest error of a rank's own, then a rank that left without a word, then the earliest word of another's death.
    The launcher itself ends the rest with SIGTERM, which is a cause only where nothing else is.
    """
    reports = _reports(folder)
    own = {rank: extra for rank, extra in reports.items() if not extra["secondary"]}
    waited = bool(reports) and min(reports.values(), key=lambda e: e["time"])["timed_out"]
    mute = {rank: code for rank, code in codes.items() if rank not in reports}
    killed = [rank for rank, code in mute.items() if code < 0 and code != -signal.SIGTERM]
    if killed and not (own and waited):
        rank = min(killed)
        if waited:
            # Peers saw a time-out and no closed connection: this rank still lived until the launcher ended it.
            return f"rank {rank} did not answer{_heard(reports, rank)}", FAILED
        return f"rank {rank} was killed by {signal.Signals(-codes[rank]).name}{_heard(reports, rank)}", FAILED
    silent = [rank for rank, code in mute.items() if code > 0]
    if not own and silent:
        rank = min(silent)
        return f"rank {rank} ended with exit code {codes[rank]}{_heard(reports, rank)}{_said(folder, rank)}", FAILED
    early = [rank for rank in range(ranks) if rank not in codes]
    if not own and early:
        return f"rank {early[0]} ended before the others, with exit code 0{_heard(reports, early[0])}", FAILED
    ended = [rank for rank, code in mute.items() if code == -signal.SIGTERM]
    if not own and not waited and ended:
        return f"rank {ended[0]} was killed by SIGTERM{_heard(reports, ended[0])}", FAILED
    if reports:
        rank, extra = min((own or reports).items(), key=lambda item: item[1]["time"])
        text = extra["text"] if extra["expected"] else f"{extra['text']}\n{extra['stack'].rstrip()}"
        # A rank that the launcher had to end may have reported before.
        code = codes.get(rank, FAILED)
        return text, code if code > 0 else FAILED
    return f"the launcher ended with exit codes {dict(codes)}", FAILED


def _heard(reports: Mapping[int, dict[str, Any]], dead_rank: int) -> str:
    """What the earliest survivor saw."""
    others = [extra for rank, extra in reports.items() if rank != dead_rank]
    return f"; then {min(others, key=lambda e: e['time'])['text']}" if others else ""


def _said(folder: Path, rank: int) -> str:
    """The end of a silent rank's standard error; rank 0's was on the terminal already."""
    for path in folder.glob(f"*/attempt_*/{rank}/stderr.log"):
        tail = path.read_text(encoding="utf-8", errors="replace")[-STDERR_TAIL:].strip()
        if tail:
            return f"; it said:\n{tail}"
    return ""


def _reports(folder: Path) -> dict[int, dict[str, Any]]:
    """What the ranks left in their error files."""
    found: dict[int, dict[str, Any]] = {}
    for path in folder.glob("*/attempt_*/*/error.json"):
        try:
            message = json.loads(path.read_text(encoding="utf-8"))["message"]
            extra = message["extraInfo"]
            found[int(path.parent.name)] = {
                "text": str(message["message"]),
                "stack": str(extra["py_callstack"]),
                "time": float(extra["time"]),
                "secondary": bool(extra["secondary"]),
                "expected": bool(extra["expected"]),
                "timed_out": "CollectiveTimeout" in str(message["message"]),
            }
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found
