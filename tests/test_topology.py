"""Topology: every group against tables written by hand, and what is refused."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshspark.parallel.topology import Coordinates, Topology, divisors

HAND_WRITTEN = {
    (4, 1, 4): (((0,), (1,), (2,), (3,)), ((0, 1, 2, 3),), ((0, 1, 2, 3),)),
    (4, 2, 2): (((0, 1), (2, 3)), ((0, 1), (2, 3)), ((0, 2), (1, 3))),
    (4, 2, 4): (((0, 1), (2, 3)), ((0, 1, 2, 3),), ((0, 2), (1, 3))),
    (4, 4, 4): (((0, 1, 2, 3),), ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))),
    (8, 2, 4): (
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        ((0, 1, 2, 3), (4, 5, 6, 7)),
        ((0, 2, 4, 6), (1, 3, 5, 7)),
    ),
    (8, 1, 2): (
        ((0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)),
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        ((0, 1, 2, 3, 4, 5, 6, 7),),
    ),
    (6, 3, 6): (((0, 1, 2), (3, 4, 5)), ((0, 1, 2, 3, 4, 5),), ((0, 3), (1, 4), (2, 5))),
}


@pytest.mark.parametrize("sizes", HAND_WRITTEN)
def test_groups_are_as_written_by_hand(sizes):
    topology = Topology(*sizes)
    assert (topology.tp_groups(), topology.ep_groups(), topology.dp_groups()) == HAND_WRITTEN[sizes]


def test_coordinates_of_one_rank():
    topology = Topology(16, 4, 8)
    assert topology.coordinates(14) == Coordinates(rank=14, dp_rank=3, tp_rank=2, ep_rank=6, ep_block=1)
    assert (topology.dp, topology.cp) == (4, 4)
    assert topology.tp_ranks(14) == (12, 13, 14, 15)
    assert topology.ep_ranks(14) == tuple(range(8, 16))


def _legal():
    return st.integers(1, 24).flatmap(
        lambda world: st.sampled_from(divisors(world)).flatmap(
            lambda ep: st.sampled_from(divisors(ep)).map(lambda tp: Topology(world, tp, ep))
        )
    )


@given(_legal())
def test_every_rank_is_in_exactly_one_group_of_each_kind(topology):
    kinds = topology.tp_groups(), topology.ep_groups(), topology.dp_groups(), topology.expert_replicas()
    for groups in kinds:
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(topology.world))
    for rank in range(topology.world):
        at = topology.coordinates(rank)
        assert topology.tp_groups()[at.dp_rank][at.tp_rank] == rank
        assert topology.ep_groups()[at.ep_block][at.ep_rank] == rank
        assert topology.dp_groups()[at.tp_rank][at.dp_rank] == rank
        assert topology.expert_replicas()[at.ep_rank][at.ep_block] == rank
        assert set(topology.tp_ranks(rank)) <= set(topology.ep_ranks(rank))


@pytest.mark.parametrize(
    ("sizes", "equation", "legal"),
    [
        ((4, 3, 4), "world % tp", "[1, 2, 4]"),
        ((4, 2, 3), "world % ep", "[2, 4]"),
        ((4, 1, 8), "world % ep", "[1, 2, 4]"),
        ((8, 4, 2), "ep % tp", "[4, 8]"),
    ],
)
def test_a_violation_names_equation_values_and_choices(sizes, equation, legal):
    with pytest.raises(ValueError) as caught:
        Topology(*sizes)
    text = str(caught.value)
    assert equation in text and legal in text
    assert str(sizes[0]) in text and (str(sizes[1]) in text or str(sizes[2]) in text)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_sizes_are_whole_numbers(value):
    with pytest.raises(ValueError, match="tp is"):
        Topology(4, value, 4)


@pytest.mark.parametrize("rank", [-1, 4])
def test_foreign_ranks_are_refused(rank):
    with pytest.raises(ValueError, match="0 to 3"):
        Topology(4, 2, 4).coordinates(rank)


def test_check_model_names_both_numbers():
    Topology(4, 2, 4).check_model(8, 96, 16)
    with pytest.raises(ValueError, match=r"o_groups is 2 and tp is 4.*\[1, 2\]"):
        Topology(4, 4, 4).check_model(2, 96, 16)
    with pytest.raises(ValueError, match="vocab_size is 101 and tp is 2"):
        Topology(4, 2, 4).check_model(8, 101, 16)
    with pytest.raises(ValueError, match="n_routed_experts is 256 and ep is 6"):
        Topology(6, 3, 6).check_model(6, 96, 256)


def test_require_same_names_both():
    with pytest.raises(ValueError, match=r"cache was built for Topology\(world=2.*Topology\(world=4"):
        Topology(4, 2, 4).require_same(Topology(2, 2, 2), "the cache")
    Topology(4, 2, 4).require_same(Topology(4, 2, 4), "the cache")


def test_it_is_frozen():
    with pytest.raises(AttributeError):
        Topology(4, 2, 4).tp = 4


def test_pure_files_import_no_torch():
    names = ("topology", "ownership", "errors", "ledger")
    imports = "; ".join(f"import meshspark.parallel.{name}" for name in names)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
