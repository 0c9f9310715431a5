"""Starting, comparing and closing: what ranks must agree on before data moves, and two lives in one process."""

import pytest
import torch.distributed as dist
from rank_pool import RankPool

from meshspark.comm import agreement
from meshspark.parallel import preflight
from meshspark.parallel.errors import CollectiveMismatch, CommError
from meshspark.parallel.groups import Groups
from meshspark.parallel.preflight import FACTS_LIMIT, compare_facts, mismatch_table
from meshspark.parallel.topology import Topology


def _said(groups, name, facts, timeout=20.0):
    """The class and text of what the comparison raises."""
    if groups.store is None:
        return ["", ""]
    store = dist.PrefixStore(name, groups.store)
    try:
        compare_facts(store, groups.topology, groups.rank, facts, timeout=timeout)
    except CommError as problem:
        return [type(problem).__name__, str(problem)]
    return ["", ""]


def equal_facts(groups):
    return _said(groups, "equal", {"config": "abc", "tp": 2, "timeout": 5.0, "seed": None})


def different_facts(groups):
    last = groups.rank == groups.topology.world - 1
    return _said(groups, "different", {"config": "x" * 500 if last else "abc", "same": 1})


def missing_fact(groups):
    return _said(groups, "missing", {"extra": 1} if groups.rank else {})


def no_plain_fact(groups):
    return _said(groups, "odd", {"odd": object() if groups.rank == 1 else 1})


def too_large(groups):
    return _said(groups, "big", {"big": "x" * (FACTS_LIMIT * 2 if groups.rank == 1 else 1)})


def other_version(groups):
    """Rank 1 runs another version of the library."""
    real = preflight._version
    if groups.rank == 1:
        preflight._version = lambda: "0.0.7"
    try:
        return _said(groups, "version", {})
    finally:
        preflight._version = real


def other_flags(groups):
    """Rank 1 was started with another tp than the others."""
    world = groups.topology.world
    try:
        groups.derive(Topology(world, 1 if groups.rank == 1 else 2, world))
    except CollectiveMismatch as problem:
        return str(problem)
    return "no error"


def told(groups):
    """What each rank tells the others, equal or not."""
    store = dist.PrefixStore("told", groups.store)
    return compare_facts(store, groups.topology, groups.rank, {}, told={"host": f"h{groups.rank}"}, timeout=20.0)


def absent(groups, rank):
    """One rank does not come."""
    return ["", ""] if groups.rank == rank else _said(groups, f"absent {rank}", {}, timeout=0.5)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_equal_facts_pass(ranks, world):
    assert ranks.run(Topology(world, 1, world), "test_preflight:equal_facts") == [["", ""]] * world


@pytest.mark.parametrize("world", [2, 4])
def test_a_difference_is_the_same_error_with_a_table_on_every_rank(ranks, world):
    said = ranks.run(Topology(world, 1, world), "test_preflight:different_facts")
    assert all(name == "CollectiveMismatch" for name, _ in said)
    assert len({text.split("number")[1].split(" ", 2)[2] for _, text in said}) == 1
    text = said[0][1]
    assert "fact config" in text and "abc" in text and "x" * 500 in text and "fact same" not in text
    assert f"rank {world - 1}" in text


def test_missing_odd_and_too_large_facts(ranks):
    topology = Topology(2, 1, 2)
    for body, words in (
        ("missing_fact", "(missing)"),
        ("no_plain_fact", "no plain values"),
        ("too_large", "characters, allowed"),
    ):
        for name, text in ranks.run(topology, f"test_preflight:{body}"):
            assert name == "CollectiveMismatch" and words in text


def test_another_version_on_one_rank_is_shown(ranks):
    for name, text in ranks.run(Topology(3, 1, 3), "test_preflight:other_version"):
        assert name == "CollectiveMismatch" and "meshspark" in text and "0.0.7" in text and "rank 1" in text


def test_other_flags_on_one_rank_stop_all_before_groups_are_made(ranks):
    for text in ranks.run(Topology(4, 1, 4), "test_preflight:other_flags"):
        assert "topology" in text and "tp 2" in text and "tp 1" in text


def test_what_ranks_tell_reaches_all(ranks):
    assert ranks.run(Topology(2, 1, 2), "test_preflight:told") == [[{"host": "h0"}, {"host": "h1"}]] * 2


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_does_not_come_is_named(ranks, rank):
    said = ranks.run(Topology(3, 1, 3), "test_preflight:absent", rank=rank)
    assert said.pop(rank) == ["", ""]
    for name, text in said:
        assert name == "CollectiveTimeout" and f"ranks [{rank}] have not started" in text


def test_the_table():
    assert mismatch_table([{"a": 1, "b": "x"}, {"a": 1, "b": "x"}], [0, 1]) == ""
    assert mismatch_table([{"a": 1, "b": "x"}, {"a": 2, "b": "x"}], [4, 5]).splitlines() == [
        "field  rank 4  rank 5",
        "a      1       2",
    ]
    assert "'1'" not in mismatch_table([{"a": "1"}, {}], [0, 1])


def two_lives(groups):
    """Start, use and close twice over one store, next to the pool's own groups, which end first."""
    store = dist.distributed_c10d._get_default_store()
    rank, world = groups.rank, groups.topology.world
    dist.destroy_process_group()
    for tp in (1, 2, 1):
        topology = Topology(world, tp, world)
        mine = Groups.start(topology, rank=rank, backend="gloo", timeout=20.0, store=store, facts={"tp": tp})
        try:
            Groups.start(topology, rank=rank, backend="gloo", store=store)
        except ValueError as problem:
            assert "already started" in str(problem)
        else:
            raise AssertionError("started twice")
        assert len(agreement.agree([rank], mine)) == world
        mine.close()
        mine.close()
        try:
            agreement.agree([rank], mine)
        except CommError as problem:
            assert "closed" in str(problem)
        else:
            raise AssertionError("used after close")
    return True


def start_with_other_flags(groups):
    """Rank 1 says another tp when everything starts; nothing stays behind, and a second start works."""
    store = dist.distributed_c10d._get_default_store()
    rank, world = groups.rank, groups.topology.world
    dist.destroy_process_group()
    try:
        Groups.start(Topology(world, 1 + rank, world), rank=rank, backend="gloo", timeout=20.0, store=store)
    except CollectiveMismatch as problem:
        said = str(problem)
    assert not dist.is_initialized()
    Groups.start(Topology(world, 2, world), rank=rank, backend="gloo", timeout=20.0, store=store)
    return said


def derived_groups(groups):
    derived = groups.derive(Topology(groups.topology.world, 2, groups.topology.world))
    assert derived.tp.size == 2 and derived.world.process_group is groups.world.process_group
    derived.close()
    derived.close()
    return agreement.agree([groups.rank], groups)


def test_start_and_close_again_and_again_in_one_process():
    pool = RankPool(2, 20.0)
    try:
        for text in pool.run(Topology(2, 1, 2), "test_preflight:start_with_other_flags", timeout=60):
            assert "tp 1" in text and "tp 2" in text
        assert pool.run(Topology(2, 1, 2), "test_preflight:two_lives", timeout=60) == [True, True]
    finally:
        pool.kill()


def test_derived_groups_leave_the_world_alone(ranks):
    assert ranks.run(Topology(2, 1, 2), "test_preflight:derived_groups") == [[[0], [1]]] * 2


def test_one_rank_starts_nothing():
    groups = Groups.start(Topology(), rank=0, backend="gloo")
    assert not dist.is_initialized() and groups.tp.process_group is None and groups.cp is groups.tp
    assert agreement.agree([5], groups) == [[5]]
    groups.close()
    groups.close()


def test_refusals():
    with pytest.raises(ValueError, match="world is 2"):
        Groups.single(topology=Topology(2, 1, 2))
    with pytest.raises(ValueError, match="0 to 1"):
        Groups.start(Topology(2, 1, 2), rank=2, backend="gloo")
    with pytest.raises(ValueError, match="timeout is 0"):
        Groups.start(Topology(2, 1, 2), rank=0, backend="gloo", timeout=0)
    with pytest.raises(ValueError, match="world is 1 and cannot become 2"):
        Groups.single().derive(Topology(2, 1, 2))
