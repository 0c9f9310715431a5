"""The chunked reduce: sums, gradients, what it keeps, and what it refuses."""

import pytest
import torch
from torch import Tensor

from meshspark.models.training.chunked import checkpointed_chunk_reduce


def sums(x: Tensor, y: Tensor | None, z: Tensor) -> tuple[Tensor, ...]:
    shifted = x if y is None else x + y
    return (shifted.sin() * z).sum(), shifted.square().sum((0, 1))


@pytest.mark.parametrize("missing", [False, True])
def test_every_chunk_size_gives_the_same(missing: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(2, 7, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    results = []
    for size in (0, 1, 2, 3, 7, 100):
        leaf, other = x.clone().requires_grad_(), y.clone().requires_grad_()
        got = checkpointed_chunk_reduce(sums, leaf, None if missing else other, z, chunk_size=size, dim=1)
        (got[0] + (got[1] * torch.arange(3)).sum()).backward()
        results.append([*got, leaf.grad] + ([] if missing else [other.grad]))
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_only_chunks_that_need_gradients_run_twice() -> None:
    calls = []

    def counted(x: Tensor) -> tuple[Tensor]:
        calls.append(x.shape[0])
        return (x.square().sum(),)

    x = torch.ones(5, 2, requires_grad=True)
    checkpointed_chunk_reduce(counted, x, chunk_size=2)[0].backward()
    assert calls == [2, 2, 1, 1, 2, 2] or sorted(calls) == [1, 1, 2, 2, 2, 2]
    calls.clear()
    checkpointed_chunk_reduce(counted, x, chunk_size=0)[0].backward()
    assert calls == [5]
    calls.clear()
    with torch.no_grad():
        checkpointed_chunk_reduce(counted, x, chunk_size=2)
    checkpointed_chunk_reduce(counted, x.detach(), chunk_size=2)
    assert calls == [2, 2, 1, 2, 2, 1]


def test_refusals() -> None:
    x = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="chunk_size is -1"):
        checkpointed_chunk_reduce(lambda x: (x.sum(),), x, chunk_size=-1)
    for nothing in ((), (None, None)):
        with pytest.raises(ValueError, match="no tensor"):
            checkpointed_chunk_reduce(lambda *x: (), *nothing, chunk_size=1)
    for size in (0, 1):
        with pytest.raises(ValueError, match="dim 0 is empty"):
            checkpointed_chunk_reduce(lambda x: (x.sum(),), x[:0], chunk_size=size)
        with pytest.raises(ValueError, match=r"lengths along dim 0 are \[3, 2\]"):
            checkpointed_chunk_reduce(lambda x, y: (x.sum(),), x, x[:2], chunk_size=size)
        with pytest.raises(ValueError, match="gave Tensor, needed: a tuple"):
            checkpointed_chunk_reduce(lambda x: x.sum(), x, chunk_size=size)
        with pytest.raises(ValueError, match="gave tuple, needed: a tuple of tensors"):
            checkpointed_chunk_reduce(lambda x: (1.0,), x, chunk_size=size)
    with pytest.raises(ValueError, match="dim is 2"):
        checkpointed_chunk_reduce(lambda x: (x.sum(),), x, chunk_size=1, dim=2)
    with pytest.raises(ValueError, match="gave 1 tensors, but 2 for the chunk before"):
        checkpointed_chunk_reduce(lambda x: (x.sum(),) * x.shape[0], x, chunk_size=2)
