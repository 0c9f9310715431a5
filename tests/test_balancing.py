"""Balancing: the bias step on pooled counts, the auxiliary loss and its fold, against formulas on one rank."""

from typing import Any

import pytest
import torch
from rank_pool import RankPools, from_bytes, to_bytes
from torch import nn

from meshspark.comm.collectives import all_reduce_rows
from meshspark.models.moe import auxiliary, balancing
from meshspark.models.moe.balancing import MoEBalancing, refuse_recompute
from meshspark.models.moe.expert_parallel import shard_experts
from meshspark.models.moe.experts import Experts
from meshspark.models.moe.layer import GatedMLP, MoELayer
from meshspark.models.moe.router import TopKRouter
from meshspark.models.training.hooks import StepOutput
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

EXPERTS, HIDDEN, TOP_K, RATE = 4, 8, 2, 1e-2
COEFS = 0.3, 0.7


def mixture(
    coef: float = 0.0, kind: str = "batch_wise", score: str = "sqrtsoftplus", experts: int = EXPERTS
) -> MoELayer:
    router = TopKRouter(HIDDEN, experts, TOP_K, score, enable_expert_bias=True, bias_update_rate=RATE)
    layer = MoELayer(router, Experts(experts, HIDDEN, 8), aux_loss_coef=coef, aux_loss_type=kind)
    layer.reset_parameters(0.5)
    return layer


class Stack(nn.Module):
    def __init__(self, coefs: tuple[float, float], kind: str, score: str = "sqrtsoftplus") -> None:
        super().__init__()
        self.layers = nn.ModuleList(mixture(coef, kind, score) for coef in coefs)

    def forward(self, x_BQH: torch.Tensor, mask_BQ: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x_BQH = x_BQH + layer(x_BQH, mask_BQ)
        return x_BQH


def stack(coefs: tuple[float, float] = COEFS, kind: str = "batch_wise", score: str = "sqrtsoftplus") -> Stack:
    torch.manual_seed(2)
    return Stack(coefs, kind, score).double()


def hooked(*layers: nn.Module) -> MoEBalancing:
    return MoEBalancing(nn.ModuleList(layers), Groups.single().world)


def batch(rank: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, mask) of a micro-batch; rank 1 keeps no token of the second, rank 0 none of the third."""
    generator = torch.Generator().manual_seed(10 * rank + micro)
    x = torch.randn(1, 5 + rank, HIDDEN, generator=generator, dtype=torch.float64)
    mask = torch.rand(1, 5 + rank, generator=generator) < 0.7
    return x, mask & ((rank, micro) not in ((1, 1), (0, 2)))


def terms(y: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (y.square().sum(2) * mask).sum(), mask.double().sum()


def train_step(groups: Groups, kind: str, score: str, shared_out: bool) -> dict[str, Any]:
    """One optimizer step of three micro-batches on this rank -> gradients of sum N / sum D, bias, metrics."""
    model = stack(kind=kind, score=score)
    if shared_out:
        shard_experts(model, groups.ep)
    hook = MoEBalancing(nn.ModuleDict({"wrapped": model}), groups.world)
    total, aux = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for micro in range(3):
        x, mask = batch(groups.rank, micro)
        numerator, denominator = terms(model(x, mask), mask)
        out = hook.before_backward(StepOutput(numerator / denominator.clamp_min(1), (numerator, denominator)))
        assert out.loss_terms is not None and all(layer.aux_loss is None for layer in model.layers)
        out.loss_terms[0].backward()
        total, aux = total + denominator, aux + out.metrics["moe/aux_loss"][0]
    total = all_reduce_rows(total, groups.world, stage="denominator")
    result = {"aux": to_bytes(aux), **{f"metric {n}": to_bytes(torch.as_tensor(v)) for n, v in hook.on_step().items()}}
    for i, layer in enumerate(model.layers):
        assert layer.gate.weight.grad is not None and not layer.tokens_per_expert.any()
        gradient = all_reduce_rows(layer.gate.weight.grad, groups.world, stage="gradient") / total
        result |= {f"gate {i}": to_bytes(gradient), f"bias {i}": to_bytes(layer.gate.expert_bias)}
    return result


def direct(ranks: int, kind: str, score: str) -> tuple[Stack, list[list[float]], list[torch.Tensor]]:
    """(model with gradients, auxiliary loss by rank and micro-batch, counts by layer): the objective as one formula."""
    model = stack((0.0, 0.0), kind, score)
    seen = [torch.zeros(EXPERTS, dtype=torch.int64) for _ in model.layers]
    numerators, denominators, extras, raw = [], [], [], [[0.0] * 3 for _ in range(ranks)]
    for micro in range(3):
        routings: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = []
        for rank in range(ranks):
            x, mask = batch(rank, micro)
            routings.append([])
            for layer in model.layers:
                scores, chosen, _ = layer.gate(x[0])
                routings[-1].append((scores / scores.sum(1, keepdim=True), chosen, mask[0]))
                x = x + layer(x)
            n, d = terms(x, mask)
            numerators.append(n)
            denominators.append(d)
        own = [[torch.bincount(chosen[mask].flatten(), minlength=EXPERTS) for _, chosen, mask in r] for r in routings]
        seen = [total + sum(counts[i] for counts in own) for i, total in enumerate(seen)]
        for rank in range(ranks):
            extra = torch.zeros(()).double()
            for i, (scores, _, mask) in enumerate(routings[rank]):
                counts = seen[i] if kind == "batch_wise" else own[rank][i]
                load = counts.double() / max(float(counts.sum()) / TOP_K, 1)
                mean = scores[mask].mean(0) if mask.any() else 0 * scores.sum(0)
                loss = EXPERTS * (load * mean).sum()
                extra, raw[rank][micro] = extra + COEFS[i] * loss, raw[rank][micro] + float(loss.detach()) / 2
            extras.append(extra)
    folded = sum(n + d * e for n, d, e in zip(numerators, denominators, extras, strict=True))
    (folded / sum(denominators)).backward()
    return model, raw, seen


@pytest.mark.parametrize(
    ("kind", "score", "shared_out"),
    [("batch_wise", "sqrtsoftplus", True), ("batch_wise", "softmax", False), ("microbatch_wise", "sigmoid", True)],
)
def test_two_ranks_step_like_one_formula(ranks: RankPools, kind: str, score: str, shared_out: bool) -> None:
    model, raw, counts = direct(2, kind, score)
    arguments = {"kind": kind, "score": score, "shared_out": shared_out}
    results = ranks.run(Topology(2, 1, 2), "test_balancing:train_step", **arguments)
    shares = [c.double() / c.sum() for c in counts]
    balance = sum(EXPERTS * float(share.square().sum()) for share in shares) / 2
    highest = sum(EXPERTS * float(share.max()) for share in shares) / 2
    for rank, result in enumerate(results):
        assert float(from_bytes(result["aux"])) == pytest.approx(sum(raw[rank]), abs=1e-12)
        assert float(from_bytes(result["metric moe/step_balance"])) == pytest.approx(balance, abs=1e-12)
        assert float(from_bytes(result["metric moe/load_max_ratio"])) == pytest.approx(highest, abs=1e-12)
        for i, layer in enumerate(model.layers):
            assert torch.allclose(from_bytes(result[f"gate {i}"]), layer.gate.weight.grad, atol=1e-12, rtol=1e-12)
            delta = RATE * torch.sign(counts[i].double().mean() - counts[i])
            assert torch.allclose(from_bytes(result[f"bias {i}"]), (delta - delta.mean()).float(), atol=1e-9)
            assert result[f"bias {i}"] == results[0][f"bias {i}"]


def pooled(groups: Groups) -> list:
    """Bias after three steps of 6 tokens, a part of them on every rank."""
    model = stack((0.0, 0.0))
    hook = MoEBalancing(model, groups.world)
    for micro in range(3):
        x = torch.cat([batch(rank, micro)[0] for rank in range(2)], dim=1)
        model(x[:, groups.rank :: groups.world.size])
        hook.on_step()
    return [to_bytes(layer.gate.expert_bias) for layer in model.layers]


def test_two_ranks_move_the_bias_as_one_with_the_whole_batch(ranks: RankPools) -> None:
    one = pooled(Groups.single())
    assert ranks.run(Topology(2, 1, 2), "test_balancing:pooled") == [one, one]
    assert any(from_bytes(bias).any() for bias in one)


def test_the_bias_step_worked_by_hand() -> None:
    layer = mixture()
    layer.tokens_per_expert.copy_(torch.tensor([10, 2, 3, 1]))
    hooked(layer).on_step()
    assert torch.allclose(layer.gate.expert_bias, RATE * torch.tensor([-1.5, 0.5, 0.5, 0.5]))
    assert not layer.tokens_per_expert.any()


@pytest.mark.parametrize(("counts", "figure"), [([6] * 8, 1.0), ([0, 12, 0, 0, 0, 12, 0, 0], 4.0), ([0] * 8, 0.0)])
def test_figures_reach_both_ends(counts: list[int], figure: float) -> None:
    layer = mixture(experts=8)
    layer.tokens_per_expert.copy_(torch.tensor(counts))
    got = hooked(layer).on_step()
    assert float(got["moe/step_balance"]) == float(got["moe/load_max_ratio"]) == figure


def test_one_exchange_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of 4 and 8 experts pool their counts in one call, and step alone."""
    calls = []

    def pool(counts: torch.Tensor, group: object, *, stage: str) -> torch.Tensor:
        calls.append(counts.shape)
        return 2 * counts

    monkeypatch.setattr(balancing, "pool_counts", pool)
    layers = [mixture(), mixture(experts=8), mixture()]
    for layer in layers:
        layer.tokens_per_expert += torch.arange(len(layer.tokens_per_expert))
    got = hooked(*layers).on_step()
    assert calls == [(3, 8)]
    shares = [torch.arange(n) / sum(range(n)) for n in (4, 8, 4)]
    assert float(got["moe/load_max_ratio"]) == pytest.approx(sum(len(s) * float(s.max()) for s in shares) / 3)
    assert [len(layer.gate.expert_bias) for layer in layers] == [4, 8, 4]
    assert torch.allclose(layers[1].gate.expert_bias, RATE * torch.tensor([1.0] * 4 + [-1.0] * 4))


def test_a_layer_without_rate_keeps_its_bias() -> None:
    layer = mixture()
    layer.gate.bias_update_rate = 0.0
    layer.gate.expert_bias.fill_(0.25)
    layer.tokens_per_expert.copy_(torch.tensor([10, 2, 3, 1]))
    hooked(layer).on_step()
    assert (layer.gate.expert_bias == 0.25).all() and not layer.tokens_per_expert.any()


def test_coefficient_zero_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(auxiliary, "all_gather_rows", lambda *a, **k: calls.append(a))
    model = stack((0.0, 0.0))
    hook = MoEBalancing(model, Groups.single().world)
    y = model(batch(0, 0)[0])
    out = StepOutput(y.sum())
    assert hook.before_backward(out) is out
    assert not calls and all(layer.aux is None and layer.aux_loss is None for layer in model.layers)


def test_batch_wise_pools_once_a_layer_and_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def gather(x: torch.Tensor, group: object, *, stage: str) -> torch.Tensor:
        calls.append((stage, x.dtype, tuple(x.shape)))
        return x

    monkeypatch.setattr(auxiliary, "all_gather_rows", gather)
    for kind, number in (("batch_wise", 2), ("microbatch_wise", 0)):
        calls.clear()
        model = stack(kind=kind)
        MoEBalancing(model, Groups.single().world)
        model(batch(0, 0)[0])
        assert calls == [("auxiliary", torch.int64, (1, EXPERTS))] * number
        model.eval()
        model(batch(0, 0)[0])
        assert len(calls) == number


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["batch_wise", "microbatch_wise"])
def test_softmax_loss_is_that_of_transformers(masked: bool, kind: str) -> None:
    # Ranks import this file too, and have no use for it.
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(3)
    layer = mixture(0.1, kind, "softmax")
    MoEBalancing(layer, Groups.single().world)
    x = torch.randn(3, 7, HIDDEN)
    mask = torch.rand(3, 7) < 0.6 if masked else None
    layer(x, mask)
    logits = x.reshape(-1, HIDDEN) @ layer.gate.weight.T
    layer.gate.expert_bias.zero_()
    wanted = load_balancing_loss_func((logits,), EXPERTS, TOP_K, None if mask is None else mask.long())
    assert layer.aux_loss is not None
    assert layer.aux_loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    mine = torch.autograd.grad(layer.aux_loss, layer.gate.weight)[0]
    theirs = torch.autograd.grad(wanted, layer.gate.weight)[0]
    assert torch.allclose(mine, theirs, atol=1e-7)


@pytest.mark.parametrize(("normalise", "scale"), [(True, 7.0), (False, 1.0)])
def test_a_uniform_load_costs_top_k_and_a_collapsed_one_the_experts(normalise: bool, scale: float) -> None:
    uniform = torch.full((6, 8), scale / 8)
    even, both = torch.full((8,), 3), torch.tensor([6, 6, 0, 0, 0, 0, 0, 0])
    loss = auxiliary.load_balancing_loss(uniform, even, None, 2, normalise=normalise)
    assert float(loss) == pytest.approx(2)
    picked = torch.zeros(6, 8)
    picked[:, :2] = scale / 2
    assert float(auxiliary.load_balancing_loss(picked, both, None, 2, normalise=normalise)) == pytest.approx(8)


def test_fold_with_and_without_terms() -> None:
    layers = [mixture(0.5), mixture(2.0), mixture(0.0)]
    hook = hooked(*layers)
    leaf = torch.tensor(3.0, requires_grad=True)
    numerator, denominator = 2 * leaf, torch.tensor(10.0, requires_grad=True)

    def leave() -> None:
        layers[0].aux_loss, layers[1].aux_loss = leaf * 1, leaf * 3

    leave()
    metrics = {"acc": (torch.tensor(1.0), torch.tensor(2.0))}
    out = hook.before_backward(StepOutput(leaf * 0, (numerator, denominator), metrics))
    # extra = 0.5 * 3 + 2 * 9
    assert out.loss.item() == 19.5 and out.loss_terms is not None
    assert out.loss_terms[0].item() == 6 + 10 * 19.5 and out.loss_terms[1] is denominator
    assert set(out.metrics) == {"acc", "moe/aux_loss"}
    assert [float(t) for t in out.metrics["moe/aux_loss"]] == [6.0, 1.0]
    assert not out.metrics["moe/aux_loss"][0].requires_grad
    out.loss_terms[0].backward()
    assert float(leaf.grad) == 2 + 10 * 6.5 and denominator.grad is None
    assert all(layer.aux_loss is None for layer in layers)
    leave()
    plain = hook.before_backward(StepOutput(leaf * 0))
    assert plain.loss.item() == 19.5 and plain.loss_terms is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", ["batch_wise", "microbatch_wise"])
def test_nothing_waits_for_a_device_cuda(kind: str) -> None:
    torch.manual_seed(0)
    model = Stack(COEFS, kind).to("cuda", torch.bfloat16)
    hook = MoEBalancing(model, Groups.single("cuda").world)
    x, mask = torch.randn(1, 6, HIDDEN, device="cuda", dtype=torch.bfloat16), torch.ones(1, 6, device="cuda").bool()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = model(x, mask)
        hook.before_backward(StepOutput(y.float().sum())).loss.backward()
        hook.on_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_recompute_is_refused_for_mixtures_only() -> None:
    refuse_recompute(nn.Sequential(GatedMLP(8, 4)))
    with pytest.raises(ValueError, match="gradient checkpointing is not supported with MoE drafts: the forward of 2"):
        refuse_recompute(nn.ModuleDict({"wrapped": stack()}))


def test_nothing_to_balance() -> None:
    with pytest.raises(ValueError, match="no mixture layers"):
        hooked(GatedMLP(8, 4))
