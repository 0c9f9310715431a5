"""Fixtures that all tests share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from rank_pool import RankPools


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Pools of ranks by size: ranks.run(topology, "test_module:function", timeout=60, **kwargs)."""
    pools = RankPools()
    yield pools
    pools.kill()


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)
