"""The start-up trial sees a backend that ends without an error and leaves its output as it was."""

import pytest
import torch
from rank_pool import RankFailure, RankPools

from meshspark.comm import backend
from meshspark.launch.exchange import stamp, try_exchanges
from meshspark.layouts.bits import same_bits
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology


def run_trial(groups: Groups, broken: str, seed: int = 0) -> None:
    """The trial with one function of the backend replaced by one that zeroes its output and reports success."""
    real = getattr(backend, broken, None)
    if real is not None:
        setattr(backend, broken, lambda output, *rest: output.zero_())
    try:
        try_exchanges(groups, seed)
    finally:
        if real is not None:
            setattr(backend, broken, real)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sound_backend_passes(ranks: RankPools, size: int) -> None:
    ranks.run(Topology(size, 1, size), "test_exchange:run_trial", broken="nothing")


@pytest.mark.parametrize(("function", "op"), [("all_gather", "all_gather_rows"), ("all_to_all", "exchange_")])
def test_zeros_are_named_by_their_op(ranks: RankPools, function: str, op: str) -> None:
    with pytest.raises(RankFailure, match=op):
        ranks.run(Topology(2, 1, 2), "test_exchange:run_trial", broken=function)


@pytest.mark.parametrize("seed", [5, 2**63 - 1])
def test_any_seed_is_legal(ranks: RankPools, seed: int) -> None:
    ranks.run(Topology(2, 1, 2), "test_exchange:run_trial", broken="nothing", seed=seed)


def test_the_seed_changes_the_data_and_keeps_pairs_apart() -> None:
    assert not same_bits(stamp(0, 1, "cpu", 1), stamp(0, 1, "cpu", 2))
    for seed in (0, 40_000):
        pairs = [(source, destination) for source in range(90) for destination in range(90)]
        firsts = {int(stamp(*pair, "cpu", seed).view(torch.int16)[0, 0]) for pair in pairs}
        assert len(firsts) == len(pairs)
