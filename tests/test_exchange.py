"""The start-up trial sees a backend that ends without an error and leaves its output as it was."""

import pytest
from rank_pool import RankFailure, RankPools

from meshspark.comm import backend
from meshspark.launch.exchange import try_exchanges
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology


def run_trial(groups: Groups, broken: str) -> None:
    """The trial with one function of the backend replaced by one that zeroes its output and reports success."""
    real = getattr(backend, broken, None)
    if real is not None:
        setattr(backend, broken, lambda output, *rest: output.zero_())
    try:
        try_exchanges(groups)
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
