"""Ranks that die, stop or come late: typed errors within seconds, no further use, nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from rank_pool import RankFailure, RankPool

from meshspark.comm import agreement, collectives
from meshspark.parallel.errors import CollectiveTimeout, CommError, RankDied, TransportError, error_kind
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology


@pytest.fixture
def pool():
    """Ranks of their own, with short time-outs: they do not outlive the test."""
    pools = []

    def make(size, timeout=4.0):
        pools.append(RankPool(size, timeout))
        return pools[-1]

    yield make
    pids = [rank.process.pid for pool in pools for rank in pool._ranks]
    for made in pools:
        made.kill()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _what_happens(groups, act):
    """[class, seconds, group, op, stage, ranks, repeated at once] of the error that `act` raises."""
    start = time.monotonic()
    try:
        act()
    except CommError as problem:
        took = time.monotonic() - start
        try:
            collectives.all_gather_rows(torch.zeros(1, 1), groups.ep, stage="after")
        except CommError as again:
            same = again is problem and time.monotonic() - start - took < 0.5
        else:
            same = False
        where = [problem.group, problem.op, problem.stage, list(problem.ranks)]
        return [type(problem).__name__, took, *where, same]
    return ["no error", time.monotonic() - start]


def die_between(groups, op):
    collectives.all_gather_rows(torch.zeros(2, 2), groups.world, stage="fine")
    if groups.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return _what_happens(groups, lambda: _call(groups, op))


def die_inside(groups, op):
    """Rank 1 is killed while it waits, like all others, for the last rank, which comes late."""
    last = groups.topology.world - 1
    if groups.rank == 1:
        threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if groups.rank == last:
        time.sleep(1.5)
    return _what_happens(groups, lambda: _call(groups, op))


def _call(groups, op):
    group = groups.world
    if op == "gather":
        collectives.all_gather_rows(torch.zeros(3, 5), group, stage="payload")
    elif op == "large gather":
        collectives.all_gather_rows(torch.zeros(1 << 18, 4), group, stage="payload")
    elif op == "exchange":
        collectives.exchange_rows(
            torch.zeros(group.size, 5), group, [1] * group.size, [1] * group.size, stage="payload"
        )
    else:
        agreement.agree([1, 2], groups, stage="payload")


def rank_0_dies_while_others_sleep(groups):
    if groups.rank == 0:
        time.sleep(3.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return _what_happens(groups, lambda: agreement.sleep(groups))


def long_sleep(groups):
    """An idle time longer than the time-out of every group."""
    if groups.rank == 0:
        time.sleep(3.0)
        agreement.wake(groups)
    else:
        agreement.sleep(groups)
    return agreement.agree([groups.rank], groups)


def late(groups):
    if groups.rank == 1:
        time.sleep(4.0)
    return _what_happens(groups, lambda: _call(groups, "gather"))


def hang(groups):
    if groups.rank == 1:
        time.sleep(60)
    return groups.rank


def leave(groups):
    if groups.rank == 1:
        os._exit(3)
    return groups.rank


def fine(groups):
    return groups.rank


def _check(answer, ranks, kinds=("RankDied",), within=5.0, group="world"):
    name, seconds, of_group, op, stage, members, at_once = answer
    assert name in kinds and seconds < within and at_once, answer
    assert (of_group, stage, members) == (group, "payload", list(range(ranks))), answer
    assert op in ("all_gather_rows", "exchange_rows")


@pytest.mark.parametrize(
    "op", [pytest.param("gather", marks=pytest.mark.slow), "exchange", pytest.param("agree", marks=pytest.mark.slow)]
)
def test_death_between_two_calls(pool, op):
    answers = pool(3, 20.0).run_surviving(Topology(3, 1, 3), "test_failures:die_between", dead=(1,), op=op)
    assert answers[1] is None
    for rank in (0, 2):
        _check(answers[rank], 3)


@pytest.mark.parametrize("op", ["gather", "large gather"])
def test_death_inside_a_call(pool, op):
    answers = pool(4, 20.0).run_surviving(Topology(4, 1, 4), "test_failures:die_inside", dead=(1,), op=op)
    for rank in (0, 2, 3):
        _check(answers[rank], 4)


def test_an_idle_time_is_no_time_out_but_the_death_of_rank_0_is_seen(pool):
    ranks = pool(3, 2.0)
    assert ranks.run(Topology(3, 1, 3), "test_failures:long_sleep") == [[[0], [1], [2]]] * 3
    answers = ranks.run_surviving(Topology(3, 1, 3), "test_failures:rank_0_dies_while_others_sleep", dead=(0,))
    for rank in (1, 2):
        name, seconds, group, op, stage, *_ = answers[rank]
        assert (name, group, op, stage) == ("RankDied", "front", "broadcast_bytes", "sleep") and 2.5 < seconds < 12.0


def test_a_rank_that_never_comes_is_a_time_out_of_the_start():
    code = """
import torch.distributed as dist
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology
store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
try:
    Groups.start(Topology(2, 1, 2), rank=0, backend="gloo", timeout=2.0, store=store)
except RuntimeError as problem:
    print(type(problem).__name__, problem.stage, problem.ranks, dist.is_initialized())
"""
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, timeout=60, check=True, capture_output=True, text=True)
    assert said.stdout.strip() == "CollectiveTimeout start (0, 1) False"


def test_a_late_rank_is_a_time_out(pool):
    ranks = pool(2, 2.0)
    answers = ranks.run(Topology(2, 1, 2), "test_failures:late")
    _check(answers[0], 2, ("CollectiveTimeout",))
    # The late one finds the connection closed, or has its data and goes on until the next call.
    assert answers[1][0] in ("RankDied", "CollectiveTimeout", "no error")


def test_the_pool_says_which_rank_hangs_or_leaves_and_starts_anew(pool):
    ranks = pool(2)
    with pytest.raises(RankFailure, match=r"(?s)rank 1:.*no answer in time"):
        ranks.run(Topology(2, 1, 2), "test_failures:hang", timeout=1.0)
    with pytest.raises(RankFailure, match=r"(?s)rank 1:.*died with status 3"):
        ranks.run(Topology(2, 1, 2), "test_failures:leave")
    assert ranks.run(Topology(2, 1, 2), "test_failures:fine") == [0, 1]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Connection closed by peer [127.0.0.1]:1", RankDied),
        ("Read error: Connection reset by peer", RankDied),
        ("Timed out waiting 2000ms for recv operation to complete", CollectiveTimeout),
        ("Application timeout caused pair closure", CollectiveTimeout),
        ("Invalid scalar type", TransportError),
    ],
)
def test_backend_messages(text, kind):
    assert error_kind(text) is kind


def test_errors_carry_where():
    group = Groups.single().tp
    problem = group.error(RankDied, "gone", "gather", "layer 3")
    assert (problem.group, problem.op, problem.stage, problem.ranks) == ("tp", "gather", "layer 3", (0,))
    assert all(word in str(problem) for word in ("gone", "gather", "layer 3", "tp", "[0]"))
