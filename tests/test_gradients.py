"""The forward is differentiable without resident rows, over expert ranks too."""

import pytest
import torch
import torch.nn.functional as F
from episodes import full_weights, make_model
from rank_pool import RankPools, from_bytes, to_bytes

from meshspark.models.numerics import FLOAT64
from meshspark.models.v4.config import tiny
from meshspark.models.v4.model import Model
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

EXPERT = "layers.2.ffn.experts.w2.weight"
DENSE = "layers.1.attn.compressor.wkv.weight"


def sequences(rank: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(20 + rank)
    return [torch.randint(2, 264, (n,), generator=generator).tolist() for n in (9, 140)]


def loss_of(model: Model, batch: list[list[int]]) -> torch.Tensor:
    logits = model.forward(model.plan_sequences(batch)).logits
    assert logits is not None
    targets = torch.tensor([token for tokens in batch for token in tokens])
    return F.cross_entropy(logits, targets, reduction="sum")


def test_gradient_is_the_slope_of_the_loss() -> None:
    """Every trained tensor moved at once along a random direction, FP64 central difference."""
    weights = {n: w.clone() for n, w in full_weights("tiny", "float64").items()}
    trained = {n: w.requires_grad_() for n, w in weights.items() if w.is_floating_point() and ".indexer." not in n}
    model = Model(tiny(), weights, Groups.single(), FLOAT64)
    loss_of(model, sequences(0)).backward()
    generator = torch.Generator().manual_seed(1)
    for name, weight in trained.items():
        if name.endswith("gate.bias"):
            assert weight.grad is None
            continue
        assert weight.grad is not None, name
    moved = {n: torch.randn(w.shape, generator=generator, dtype=torch.float64) for n, w in trained.items()}
    slope = sum(float((w.grad * moved[n]).sum()) for n, w in trained.items() if w.grad is not None)
    step, values = 1e-8, []
    with torch.no_grad():
        for sign in (1, -1):
            shifted = {
                n: w + sign * step * moved[n] if n in moved and w.grad is not None else w for n, w in weights.items()
            }
            values.append(float(loss_of(Model(tiny(), shifted, Groups.single(), FLOAT64), sequences(0))))
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5)


def rank_gradients(groups: Groups, one_sided: bool) -> dict:
    """Gradients of this rank's own loss over its experts; one-sided routes every learned row to rank 0."""
    model = make_model(groups, "tiny", "float64")
    expert = model.blocks[2].moe.experts.w2.requires_grad_()
    compressor = model.blocks[1].attention.compressor
    assert compressor is not None
    dense = compressor.wkv.requires_grad_()
    if one_sided:
        for block in model.blocks[1:]:
            block.moe.router.bias[: model.config.n_routed_experts // 2] += 1e6
    expert.grad = dense.grad = None
    loss_of(model, sequences(groups.rank)).backward()
    assert expert.grad is not None and dense.grad is not None
    result = {"expert": to_bytes(expert.grad), "dense": to_bytes(dense.grad)}
    if one_sided:
        for block in model.blocks[1:]:
            block.moe.router.bias[: model.config.n_routed_experts // 2] -= 1e6
    expert.requires_grad_(False)
    dense.requires_grad_(False)
    return result


@pytest.mark.parametrize("one_sided", [False, True])
def test_expert_ranks_share_gradients_like_one_rank(ranks: RankPools, one_sided: bool) -> None:
    results = ranks.run(Topology(2, 1, 2), "test_gradients:rank_gradients", timeout=100, one_sided=one_sided)
    weights = {n: w.clone() for n, w in full_weights("tiny", "float64").items()}
    if one_sided:
        for name, weight in weights.items():
            if name.endswith("gate.bias"):
                weight[:8] += 1e6
    for name in (EXPERT, DENSE):
        weights[name].requires_grad_()
    model = Model(tiny(), weights, Groups.single(), FLOAT64)
    sum(loss_of(model, sequences(rank)) for rank in range(2)).backward()
    expert = torch.cat([from_bytes(r["expert"]) for r in results])
    dense = sum(from_bytes(r["dense"]) for r in results)
    assert weights[EXPERT].grad is not None and weights[DENSE].grad is not None
    torch.testing.assert_close(expert, weights[EXPERT].grad, rtol=0, atol=1e-10)
    torch.testing.assert_close(dense, weights[DENSE].grad, rtol=0, atol=1e-10)
    if one_sided:
        assert not from_bytes(results[1]["expert"]).any()
