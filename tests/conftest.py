"""Fixtures that all tests share."""

import signal
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


@pytest.fixture(scope="session", autouse=True)
def _interrupts_arrive() -> None:
    # A shell starts background jobs with SIGINT ignored, and processes that tests start would inherit it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)
