"""Ranks that die, stop or come late: typed errors within seconds, no further use, nothing left behind."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankFailure, RankPool

from meshspark.comm import agreement, collectives, window
from meshspark.comm.connect import Connections, Wish
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


def stopped(groups, pids):
    """Rank 1 is stopped, as by a debugger, before its call; the parent lets it go on and kills it."""
    if groups.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return _what_happens(groups, lambda: _call(groups, "gather"))


def die_after(groups):
    """Rank 1 is killed after a call; the others notice in one that it has no part in."""
    collectives.all_gather_rows(torch.zeros(2, 2), groups.world, stage="fine")
    if groups.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pair = Topology(4, 2, 4)
    assert groups.topology == pair
    if groups.rank == 3:
        time.sleep(1.0)
    # Ranks 2 and 3 are a tensor group of their own, rank 0 waits for rank 1.
    return _what_happens(groups, lambda: collectives.all_gather_rows(torch.zeros(1, 1), groups.tp, stage="payload"))


def _wrong_call(groups, fault):
    """The last rank does something else than the others."""
    odd = groups.rank == groups.topology.world - 1
    world, size = groups.world, groups.topology.world
    if fault in ("shape", "large shape"):
        rows = (1 << 19 if fault == "large shape" else 10) + 2 * odd
        collectives.all_gather_rows(torch.zeros(rows, 1), world, stage="payload")
    elif fault == "dtype":
        dtype = torch.int32 if odd else torch.float32
        collectives.all_gather_rows(torch.zeros(4, 4, dtype=dtype), world, stage="payload")
    elif fault == "op":
        if odd:
            collectives.broadcast_bytes(None, world, 0, length=4, stage="payload")
        else:
            collectives.all_gather_rows(torch.zeros(4, 4), world, stage="payload")
    elif fault in ("split", "short split", "large split"):
        rows = 1 << 16 if fault == "large split" else 4
        other = -1 if fault == "short split" else 1
        sent, received = [rows] * size, [rows] * size
        if odd:
            sent[0] += other
        collectives.exchange_rows(torch.zeros(sum(sent), 8), world, sent, received, stage="payload")
    else:
        assert fault == "order"
        for group in (groups.ep, groups.world) if odd else (groups.world, groups.ep):
            collectives.all_gather_rows(torch.zeros(4, 4), group, stage="payload")


MISMATCHES = ("shape", "large shape", "dtype", "op", "split", "short split", "large split", "order")


def mismatches(groups, how):
    """For each of MISMATCHES, in groups of its own: what happens, and what the message says."""
    store, rank, topology = dist.PrefixStore("mine", groups.store), groups.rank, groups.topology
    groups.close()
    return [_mismatch(store, rank, topology, how, fault) for fault in MISMATCHES]


def _mismatch(store, rank, topology, transport, fault):
    wiring = Connections(Wish(transport, "signature"))
    groups = Groups.start(topology, rank=rank, backend="gloo", timeout=20.0, store=store, connections=wiring)
    said = []

    def act():
        try:
            _wrong_call(groups, fault)
        except CommError as problem:
            said.append(str(problem))
            raise

    happened = _what_happens(groups, act)
    groups.close()
    return [happened, *said]


def no_room(groups, where):
    """Shared memory is full on the first rank when a window is wanted."""
    if groups.rank == 0:
        window.os.posix_fallocate = _full
    return _what_happens(groups, lambda: _call(groups, "large gather"))


def _full(descriptor, offset, size):
    raise OSError(errno.ENOSPC, "No space left on device")


def _check(answer, named, kinds=("RankDied",), within=5.0, group="world"):
    name, seconds, of_group, op, stage, members, at_once = answer
    assert name in kinds and seconds < within and at_once, answer
    assert (of_group, stage, members) == (group, "payload", named), answer
    assert op in ("all_gather_rows", "exchange_rows")


@pytest.mark.parametrize(
    ("op", "transport"),
    [
        ("exchange", "local"),
        ("exchange", "torch"),
        pytest.param("gather", "local", marks=pytest.mark.slow),
        pytest.param("agree", "local", marks=pytest.mark.slow),
        pytest.param("agree", "torch", marks=pytest.mark.slow),
    ],
)
def test_death_between_two_calls(pool, op, transport):
    topology = Topology(3, 1, 3)
    answers = pool(3, 20.0).run_surviving(topology, "test_failures:die_between", dead=(1,), op=op, transport=transport)
    assert answers[1] is None
    for rank in (0, 2):
        _check(answers[rank], [1])


@pytest.mark.parametrize(
    ("op", "transport"), [("gather", "torch"), ("large gather", "local"), ("large gather", "torch")]
)
def test_death_inside_a_call(pool, op, transport):
    answers = pool(4, 20.0).run_surviving(
        Topology(4, 1, 4), "test_failures:die_inside", dead=(1,), op=op, transport=transport
    )
    for rank in (0, 2, 3):
        _check(answers[rank], [1])


def test_a_death_ends_the_wait_of_ranks_that_share_no_group_with_it(pool):
    answers = pool(4, 20.0).run_surviving(Topology(4, 2, 4), "test_failures:die_after", dead=(1,))
    for rank in (0, 2):
        _check(answers[rank], [1], group="tp")


@pytest.mark.parametrize("transport", ["local", "torch"])
def test_a_stopped_rank_is_named_when_the_time_is_up(pool, transport):
    ranks = pool(3, 2.0)
    pids = ranks.pids
    waiting = threading.Timer(6.0, os.kill, (pids[1], signal.SIGKILL))
    waiting.start()
    try:
        answers = ranks.run_surviving(
            Topology(3, 1, 3), "test_failures:stopped", dead=(1,), pids=pids, transport=transport
        )
    finally:
        waiting.cancel()
    for rank in (0, 2):
        _check(answers[rank], [1], ("CollectiveTimeout",), within=7.0)


@pytest.mark.parametrize("transport", ["local", "torch"])
def test_a_mismatch_is_the_same_error_on_every_rank_before_data_moves(pool, transport):
    """What gloo answers with wrong sums, an abort or a hang."""
    told = pool(3, 20.0).run(Topology(3, 1, 3), "test_failures:mismatches", how=transport, timeout=120.0)
    for fault, *answers in zip(MISMATCHES, *told, strict=True):
        for answer, text in answers:
            assert answer[0] == "CollectiveMismatch" and answer[1] < 5.0 and answer[-1], (fault, answer)
            assert answer[5] == [0, 1, 2] and "rank 2" in text and "differ" in text, (fault, text)
            assert text.partition("differ")[2] == answers[0][1].partition("differ")[2]


def test_full_shared_memory_is_one_error_that_names_the_rank(pool):
    answers = pool(3, 20.0).run(Topology(3, 1, 3), "test_failures:no_room", where="world")
    for answer in answers:
        _check(answer, [0], ("TransportError",))


def test_an_idle_time_is_no_time_out_but_the_death_of_rank_0_is_seen(pool):
    ranks = pool(3, 2.0)
    assert ranks.run(Topology(3, 1, 3), "test_failures:long_sleep") == [[[0], [1], [2]]] * 3
    answers = ranks.run_surviving(Topology(3, 1, 3), "test_failures:rank_0_dies_while_others_sleep", dead=(0,))
    for rank in (1, 2):
        name, seconds, group, op, stage, members, _ = answers[rank]
        assert members == [0]
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
    assert said.stdout.strip() == "CollectiveTimeout start (1,) False"


def test_a_late_rank_is_a_time_out(pool):
    ranks = pool(2, 2.0)
    answers = ranks.run(Topology(2, 1, 2), "test_failures:late")
    _check(answers[0], [1], ("CollectiveTimeout",), within=7.0)
    # The late one hears that the others gave up, and for whom they had waited.
    _check(answers[1], [1], ("CollectiveTimeout",))


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
