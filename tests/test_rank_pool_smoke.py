from meshspark.parallel.topology import Topology

def body(groups, value):
    return [groups.rank, groups.tp.rank, groups.ep.rank, value]

def boom(groups):
    if groups.rank == 1: raise RuntimeError("boom")
    return 1

def test_a(ranks):
    import time, pytest, rank_pool
    for n in (1, 2, 4):
        t = time.time(); print(ranks.run(Topology(n, 1, n), "test_rank_pool_smoke:body", value="x"), time.time() - t)
        t = time.time(); print(ranks.run(Topology(n, min(n, 2), n), "test_rank_pool_smoke:body", value="x"), time.time() - t)
    with pytest.raises(rank_pool.RankFailure) as e: ranks.run(Topology(2, 1, 2), "test_rank_pool_smoke:boom")
    print(e.value)
    print(ranks.run(Topology(2,1,2), "test_rank_pool_smoke:body", value=3))
