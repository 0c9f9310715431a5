"""Heads to the owners of their output group, and the fixed tree back: bits do not depend on the group's size.

Weight shards that travel while a rank computes: nothing is reused too early, and no failure is lost or waited for.
"""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from meshspark.comm import collectives, oracle, pending, projection
from meshspark.layouts.bits import same_bits
from meshspark.parallel.errors import CommError, TransportError
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

# (tp, output groups): whole branches, and single partials where a rank's groups are none, as in 6 over 3.
CASES = [(1, 8), (1, 6), (2, 8), (2, 6), (3, 6), (3, 3), (4, 8), (4, 4)]


def _randn(seed, *shape, dtype=torch.float32):
    # Exponents far apart, so that another order of adding gives other bits.
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 10.0 ** torch.randint(-4, 5, shape, generator=generator)).to(
        dtype
    )


def publish(groups, num_groups):
    group = groups.tp
    for T in (3, 1, 0):
        heads = [_randn(rank, T, num_groups, 5).bfloat16() for rank in range(group.size)]
        mine = heads[group.rank].transpose(0, 1).contiguous().transpose(0, 1)
        got = projection.publish_heads(mine, group, stage="publish")
        assert same_bits(got, oracle.publish_heads(heads)[group.rank])


def reduce(groups, num_groups):
    """Own rows of the sum over all groups, and those of one rank that holds all groups."""
    group = groups.tp
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for T in (3, 1, 0):
            whole = _randn(5, group.size * T, num_groups, 7, dtype=dtype)
            parts = list(whole.chunk(group.size, 1))
            got = projection.reduce_partials(parts[group.rank], group, num_groups, stage="reduce")
            assert same_bits(got, oracle.reduce_partials(parts)[group.rank])
            alone = projection.reduce_partials(whole, Groups.single().tp, num_groups, stage="reduce")
            assert same_bits(got, alone[group.rank * T : (group.rank + 1) * T])
            everything = projection.gather_projected(got, group, stage="all")
            assert same_bits(everything, alone)


def weights(groups, num_groups):
    group = groups.tp
    P = num_groups // group.size
    shards = [(_randn(rank, P * 3, 4).bfloat16(), _randn(9 + rank, 6, P * 3).bfloat16()) for rank in range(group.size)]
    got = projection.gather_weight_shards(*shards[group.rank], group)
    wanted = oracle.gather_weight_shards(shards)[group.rank]
    assert all(same_bits(a, b) and a.is_contiguous() for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(("tp", "num_groups"), CASES)
@pytest.mark.parametrize("body", ["publish", "reduce", "weights"])
def test_against_the_oracle(ranks, tp, num_groups, body):
    ranks.run_both(Topology(tp, tp, tp), f"test_projection:{body}", num_groups=num_groups)


def test_two_tensor_groups_side_by_side(ranks):
    for body in ("publish", "reduce", "weights"):
        ranks.run(Topology(4, 2, 4), f"test_projection:{body}", num_groups=8)


@pytest.mark.slow
def test_six_groups_over_three_ranks(ranks):
    for body in ("publish", "reduce", "weights"):
        ranks.run(Topology(6, 3, 6), f"test_projection:{body}", num_groups=6)


def test_the_tree():
    assert projection.tree_nodes(4) == {(0, 4), (0, 2), (2, 4), (0, 1), (1, 2), (2, 3), (3, 4)}
    # 6 = 3 + 3, 3 = 1 + 2: pairs of neighbours are no whole branches, so 3 ranks send single groups.
    assert (0, 3) in projection.tree_nodes(6) and (0, 2) not in projection.tree_nodes(6)
    values = [torch.tensor(v) for v in (1e8, 1.0, -1e8, 1.0)]
    assert projection.tree_sum(values).item() == 0.0
    assert projection.tree_sum(values[:1]) is values[0]
    with pytest.raises(ValueError, match="nothing to add"):
        projection.tree_sum([])


def test_refusals():
    group = Groups.single().tp
    with pytest.raises(ValueError, match="6 groups over 1 ranks"):
        projection.reduce_partials(torch.zeros(2, 3, 4), group, 6, stage="s")


def uneven(groups):
    try:
        projection.publish_heads(torch.zeros(1, 3, 2), groups.tp, stage="s")
    except ValueError as problem:
        return str(problem)
    return "no error"


def test_output_groups_that_do_not_divide_are_refused(ranks):
    said = ranks.run(Topology(2, 2, 2), "test_projection:uneven")
    assert all("3 output groups cannot be split equally over 2 ranks" in text for text in said)


# Large enough that the thread reads them where ranks share a host.
LARGE = (2 * pending.DIRECT_BYTES // 8, 4)


def _shards(rank, epoch, shapes=(LARGE, LARGE)):
    stamp = float(1000 * epoch + rank)
    return tuple(torch.full(shape, stamp + 0.25 * i) for i, shape in enumerate(shapes))


def ahead(groups, num_groups):
    """Shards of two dtypes, small and large, strided and empty, against the oracle; other calls come between."""
    group = groups.tp
    P = num_groups // group.size
    for rows, columns in ((P * 3, 4), (P * 300, 700), (0, 4)):
        a = [_randn(rank, rows, columns).bfloat16() for rank in range(group.size)]
        b = [(_randn(9 + rank, columns, rows) * 50).to(torch.int8) for rank in range(group.size)]
        room = (
            torch.empty(group.size * rows, columns).bfloat16(),
            torch.empty(group.size * columns, rows).to(torch.int8),
        )
        mine = a[group.rank].t().contiguous().t(), b[group.rank]
        handle = projection.start_gather_weight_shards(*mine, group, buffers=room)
        between = collectives.all_gather_rows(torch.tensor([group.rank]), group, stage="between")
        large = collectives.all_gather_rows(torch.full((1 << 18, 1), group.rank), group, stage="between")
        assert between.tolist() == list(range(group.size)) and large[-1].item() == group.size - 1
        got = handle.wait()
        for source, pair in enumerate(got):
            assert same_bits(pair[0], a[source]) and same_bits(pair[1], b[source])
        assert got[0][0].data_ptr() == room[0].data_ptr()
        whole = oracle.gather_weight_shards(list(zip(a, b, strict=True)))[group.rank]
        assert same_bits(torch.cat([x for x, _ in got]), whole[0])
        assert same_bits(torch.cat([y for _, y in got], 1), whole[1])


@pytest.mark.parametrize(("tp", "num_groups"), [(1, 8), (2, 8), (3, 6), (4, 4)])
def test_shards_that_travel_ahead(ranks, tp, num_groups):
    ranks.run_both(Topology(tp, tp, tp), "test_projection:ahead", num_groups=num_groups)


def reused(groups, epochs):
    """Shards are freed after the start and overwritten as soon as the wait returns; ranks dawdle in turn."""
    group = groups.tp
    buffers = [tuple(torch.empty(group.size * LARGE[0], LARGE[1]) for _ in "ab") for _ in "01"]
    handle = None
    for epoch in range(epochs + 1):
        got = None if handle is None else handle.wait()
        if epoch < epochs:
            mine = _shards(group.rank, epoch)
            handle = projection.start_gather_weight_shards(*mine, group, buffers=buffers[epoch % 2])
            # The handle keeps the shards: their memory must not become somebody else's.
            del mine
            [torch.full(LARGE, float("nan")) for _ in range(4)]
        if epoch % group.size == group.rank and epoch % 5 == 0:
            time.sleep(0.002)
        for source, pair in enumerate(got or ()):
            for i, part in enumerate(pair):
                assert (part == 1000 * (epoch - 1) + source + 0.25 * i).all(), (epoch, source, i)
    kept = _shards(group.rank, epochs)
    for epoch in range(epochs):
        for i, shard in enumerate(kept):
            shard.fill_(1000 * epoch + group.rank + 0.25 * i)
        if epoch % group.size == group.rank and epoch % 5 == 0:
            time.sleep(0.002)
        handle = projection.start_gather_weight_shards(*kept, group, buffers=buffers[epoch % 2])
        if epoch % group.size != group.rank and epoch % 5 == 1:
            time.sleep(0.002)
        got = handle.wait()
        for shard in kept:
            shard.fill_(float("nan"))
        for source, pair in enumerate(got):
            for i, part in enumerate(pair):
                assert (part == 1000 * epoch + source + 0.25 * i).all(), (epoch, source, i)
    return True


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_may_be_freed_at_once_and_overwritten_after_the_wait(ranks, tp):
    assert all(ranks.run_both(Topology(tp, tp, tp), "test_projection:reused", epochs=100))


@pytest.fixture
def own_pool():
    """Ranks of their own, which do not outlive the test."""
    pools = []

    def make(size, timeout):
        pools.append(RankPool(size, timeout))
        return pools[-1]

    yield make
    for pool in pools:
        pool.kill()


def _failure(groups, act):
    """[class, seconds, op, stage, ranks, whether it comes again at once in other calls and in a second start]."""
    begin = time.monotonic()
    try:
        act()
    except CommError as problem:
        took, again = time.monotonic() - begin, 0
        for other in (groups.ep, groups.tp):
            try:
                projection.start_gather_weight_shards(*_shards(0, 0), other)
            except CommError as second:
                again += second is problem
        return [type(problem).__name__, took, problem.op, problem.stage, list(problem.ranks), again == 2]
    return ["no error", time.monotonic() - begin, "", "", [], False]


def fault_under_way(groups, fault):
    """Rank 1 does something else while shards travel."""
    group = groups.tp
    handle = projection.start_gather_weight_shards(*_shards(group.rank, 0), group)
    if group.rank == 1 and fault == "late":
        time.sleep(5.0)
    elif group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "dies, seen elsewhere":
        found = _failure(groups, lambda: collectives.all_gather_rows(torch.zeros(3, 3), groups.world, stage="other"))
        assert _failure(groups, handle.wait)[1] < 0.5
        return found
    return _failure(groups, handle.wait)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("transport", "fault"),
    [
        ("local", "dies"),
        ("torch", "dies"),
        pytest.param("local", "dies, seen elsewhere", marks=slow),
        pytest.param("torch", "dies, seen elsewhere", marks=slow),
    ],
)
def test_a_death_while_shards_travel_is_seen_at_once(own_pool, transport, fault):
    target = "test_projection:fault_under_way"
    told = own_pool(3, 20.0).run_surviving(Topology(3, 3, 3), target, dead=(1,), transport=transport, fault=fault)
    place = ["finish_gather_rows", "gather_weights"] if fault == "dies" else ["all_gather_rows", "other"]
    for rank in (0, 2):
        assert told[rank][0] == "RankDied" and told[rank][2:] == [*place, [1], True], told[rank]
        assert told[rank][1] < 5.0


@pytest.mark.parametrize("transport", ["local", pytest.param("torch", marks=slow)])
def test_a_late_rank_is_a_time_out_of_the_wait(own_pool, transport):
    told = own_pool(2, 2.0).run(Topology(2, 2, 2), "test_projection:fault_under_way", transport=transport, fault="late")
    assert told[0][0] == "CollectiveTimeout" and told[0][2:] == ["finish_gather_rows", "gather_weights", [1], True]
    assert 1.5 < told[0][1] < 7.0 and told[1][0] == "CollectiveTimeout"


def gives_up(groups):
    """Rank 1 fails elsewhere while its shards travel; no doorbell tells anybody, only its connections close."""
    store, rank, topology = dist.PrefixStore("alone", groups.store), groups.rank, groups.topology
    groups.close()
    own = Groups.start(topology, rank=rank, backend="gloo", timeout=20.0, store=store)
    handle = projection.start_gather_weight_shards(*_shards(rank, 0, ((1 << 20, 4), LARGE)), own.ep)
    if rank == 1:
        own.world.poison(own.world.error(TransportError, "broken elsewhere", "x", "elsewhere"))
        handle.drop()
        time.sleep(6.0)
        return None
    return _failure(own, lambda: (handle.wait(), collectives.all_gather_rows(torch.zeros(3), own.ep, stage="after")))


def test_a_rank_that_gives_up_does_not_hold_its_peers(own_pool):
    told = own_pool(2, 20.0).run(Topology(2, 1, 2), "test_projection:gives_up")
    assert told[0][0] == "RankDied" and told[0][1] < 5.0, told


def start_against_a_gather(groups):
    """The last rank gathers where the others start to."""
    x = torch.ones(LARGE)
    verb = collectives.all_gather_rows if groups.rank == 1 else collectives.start_gather_rows
    return _failure(groups, lambda: verb(x, groups.tp, stage="payload"))


@pytest.mark.parametrize("transport", ["local", pytest.param("torch", marks=slow)])
def test_a_start_is_compared_before_data_moves(own_pool, transport):
    told = own_pool(2, 20.0).run(Topology(2, 2, 2), "test_projection:start_against_a_gather", transport=transport)
    assert all(answer[0] == "CollectiveMismatch" and answer[1] < 5.0 and answer[-1] for answer in told), told


def no_memory_of_others(groups):
    """Ranks that may not read each other's memory gather at once."""
    host = groups.tp.control.host
    read, host.read = host.read, None
    try:
        ahead(groups, 4)
    finally:
        host.read = read
    return True


def test_without_direct_reads(ranks):
    assert all(ranks.run(Topology(2, 2, 2), "test_projection:no_memory_of_others"))


def test_a_shard_that_needs_a_gradient_is_refused():
    needs = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(ValueError, match="start_gather_rows does not carry"):
        projection.start_gather_weight_shards(needs, needs, Groups.single().tp)
