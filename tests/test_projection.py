"""Heads to the owners of their output group, and the fixed tree back: bits do not depend on the group's size."""

import pytest
import torch

from meshspark.comm import oracle, projection
from meshspark.layouts.bits import same_bits
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
