"""Experts shared out over ranks: outputs and gradients of 2 and 4 ranks are those of one, in FP64."""

from typing import Any

import pytest
import torch
from rank_pool import RankPools, from_bytes, to_bytes
from torch import nn

from meshspark.comm.collectives import all_reduce_rows
from meshspark.models.moe import expert_parallel as ep_module
from meshspark.models.moe.experts import Experts
from meshspark.models.moe.layer import MoELayer, SharedExpert
from meshspark.models.moe.router import TopKRouter
from meshspark.parallel.group import Group
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

EXPERTS, HIDDEN, WIDTH = 8, 8, 4
ROWS = {"ragged": [5, 0, 9, 2], "alike": [4, 4, 4, 4], "none": [0, 0, 0, 0]}


class Stack(nn.Module):
    """Two residual mixture layers; the last two experts of the second get no token where `starved`."""

    def __init__(self, top_k: int, starved: bool = False, backend: Any = "grouped") -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MoELayer(
                TopKRouter(HIDDEN, EXPERTS, top_k, "sigmoid", enable_expert_bias=True),
                Experts(EXPERTS, HIDDEN, WIDTH, 10.0, backend),
                SharedExpert(HIDDEN, WIDTH),
            )
            for _ in range(2)
        )
        for layer in self.layers:
            layer.reset_parameters(0.5)
        if starved:
            self.layers[1].gate.expert_bias[-2:] = -1e3

    def forward(self, x_BQH: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_BQH = x_BQH + layer(x_BQH)
        return x_BQH


def stack(top_k: int, **more: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(top_k, **more).double()


def tokens(rows: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(1, n, HIDDEN, generator=generator, dtype=torch.float64) for n in rows]


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y * torch.arange(1.0, HIDDEN + 1).double()).square().sum()


def mean_gradients(model: nn.Module, groups: Groups) -> dict[str, torch.Tensor]:
    """Averages over all ranks for dense weights, over replicas for experts, then the documented scale."""
    experts = dict(ep_module.expert_parameters(model))
    replicas = groups.expert_replicas()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        group = replicas if name in experts else groups.world
        parameter.grad = all_reduce_rows(parameter.grad, group, stage="mean") / group.size
    ep_module.scale_expert_gradients(model)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def step(
    groups: Groups, kind: str, strategy: str, top_k: int, starved: bool, backend: str, fixed: bool
) -> dict[str, Any]:
    """Output, gradient of the input and mean gradients of every weight, whole; the same bits when run again."""
    model = stack(top_k, starved=starved, backend=backend)
    shares = ep_module.shard_experts(model, groups.ep, strategy)
    rows = ROWS[kind][: groups.world.size]
    for share in shares:
        share.most_rows = max(rows) if fixed else None
    results = []
    for _ in range(2):
        model.zero_grad()
        x = tokens(rows)[groups.rank].requires_grad_()
        y = model(x)
        loss_of(y).backward()
        assert x.grad is not None
        gradients = mean_gradients(model, groups)
        experts = dict(ep_module.expert_parameters(model))
        assert len(experts) == 4
        whole = {n: ep_module.gather_experts(g, groups.ep) if n in experts else g for n, g in gradients.items()}
        results.append({n: to_bytes(t) for n, t in {**whole, "x": x.grad, "y": y}.items()})
    assert results[0] == results[1]
    assert torch.equal(model.layers[0].tokens_per_expert.sum(), torch.tensor(2 * rows[groups.rank] * top_k))
    return results[0]


CASES = [
    ("ragged", "all_gather", 6, True, "grouped", False),
    ("ragged", "all_to_all", 6, True, "grouped", False),
    ("ragged", "all_gather", 1, False, "loop", False),
    ("ragged", "all_to_all", 1, False, "loop", False),
    ("alike", "all_gather", 2, False, "grouped", True),
    ("alike", "all_to_all", 2, True, "grouped", False),
    ("none", "all_gather", 2, False, "grouped", False),
    ("none", "all_to_all", 2, False, "loop", False),
]


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 4), (4, 2)])
def test_ranks_are_like_one(ranks: RankPools, world: int, ep: int) -> None:
    for kind, strategy, top_k, starved, backend, fixed in CASES:
        more = {"kind": kind, "strategy": strategy, "top_k": top_k}
        more |= {"starved": starved, "backend": backend, "fixed": fixed}
        results = ranks.run(Topology(world, 1, ep), "test_expert_parallel:step", **more)
        model = stack(top_k, starved=starved, backend=backend)
        x = torch.cat(tokens(ROWS[kind][:world]), dim=1).requires_grad_()
        y = model(x)
        loss_of(y).backward()
        assert x.grad is not None
        if starved:
            assert not model.layers[1].tokens_per_expert[-2:].any()
        for name, wanted in (("x", x.grad), ("y", y)):
            got = torch.cat([from_bytes(result[name]) for result in results], dim=1)
            assert torch.allclose(got, wanted, atol=1e-12, rtol=1e-12), (name, more)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            for result in results:
                got = from_bytes(result[name])
                assert torch.allclose(got, parameter.grad / world, atol=1e-12, rtol=1e-12), (name, more)


def state(groups: Groups) -> None:
    """Whole state dicts: what was shared out comes back, and loads into any number of ranks."""
    model, whole = stack(2), stack(2)
    ep_module.shard_experts(model, groups.ep)
    share = EXPERTS // groups.ep.size
    assert model.layers[0].experts.gate_up_proj.shape[0] == share
    full = ep_module.full_state_dict(model, "cpu")
    wanted = whole.state_dict()
    assert list(full) == list(wanted) and all(torch.equal(full[n], wanted[n]) for n in wanted)
    moved = {name: tensor + 1 for name, tensor in wanted.items()}
    ep_module.load_full_state_dict(model, moved)
    again = ep_module.full_state_dict(model)
    assert all(torch.equal(again[n], moved[n]) for n in moved)


def drawn(groups: Groups) -> None:
    """Ranks draw the experts and what follows as one rank does, from equal generators."""
    model, whole = stack(2), stack(2)
    ep_module.shard_experts(model, groups.ep)
    for stacked in (model, whole):
        torch.manual_seed(9)
        for layer in stacked.layers:
            layer.reset_parameters(0.1)
    got = ep_module.full_state_dict(model)
    if groups.ep.size > 1:
        assert not torch.equal(got["layers.0.experts.down_proj"][0], got["layers.0.experts.down_proj"][-1])
    assert all(torch.equal(got[n], t) for n, t in whole.state_dict().items())


@pytest.mark.parametrize("ep", [2, 4])
def test_state_dicts_are_whole(ranks: RankPools, ep: int) -> None:
    state(Groups.single())
    ranks.run(Topology(ep, 1, ep), "test_expert_parallel:state")


def test_ranks_draw_what_one_draws(ranks: RankPools) -> None:
    drawn(Groups.single())
    ranks.run(Topology(2, 1, 2), "test_expert_parallel:drawn")


def half(groups: Groups, autocast: bool) -> None:
    """BF16, as weights or by autocast: dtypes of the plain module, values of FP64 to BF16's accuracy."""
    torch.manual_seed(1)
    plain = Experts(EXPERTS, 16, 8)
    plain.reset_parameters(0.3)
    xs, chosen = torch.randn(2, 5, 16), torch.rand(2, 5, EXPERTS).argsort(2)[:, :, :3]
    weights = torch.rand(2, 5, 3)
    wanted = torch.stack([plain.double()(*parts) for parts in zip(xs.double(), chosen, weights.double(), strict=True)])
    gradient = torch.autograd.grad(wanted.sum(), plain.down_proj)[0]
    dtype = torch.float32 if autocast else torch.bfloat16
    me, plain = groups.rank, plain.to(dtype)
    for strategy in ("all_gather", "all_to_all"):
        parallel = ep_module.ParallelExperts(plain, groups.ep, strategy)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = parallel(xs[me].to(dtype), chosen[me], weights[me])
            assert y.dtype == plain(xs[me].to(dtype), chosen[me], weights[me]).dtype
        assert torch.allclose(y.double(), wanted[me], atol=2e-2, rtol=2e-2)
        y.sum().backward()
        assert parallel.down_proj.grad is not None and parallel.down_proj.grad.dtype == dtype
        assert torch.allclose(parallel.down_proj.grad.double(), gradient[parallel.own], atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(ranks: RankPools, autocast: bool) -> None:
    ranks.run(Topology(2, 1, 2), "test_expert_parallel:half", autocast=autocast)


def test_a_group_of_one_is_the_plain_module() -> None:
    torch.manual_seed(1)
    plain = Experts(EXPERTS, 16, 8).bfloat16()
    parallel = ep_module.ParallelExperts(plain, Groups.single().ep)
    x = torch.randn(12, 16).bfloat16()
    chosen = torch.rand(12, EXPERTS).argsort(1)[:, :3]
    weights = torch.rand(12, 3)
    assert torch.equal(parallel(x, chosen, weights), plain(x, chosen, weights))


def pair(rank: int = 0) -> Group:
    return Group("ep", (0, 1), rank, None, topology=Topology(2, 1, 2))


def test_a_model_on_meta_loads_its_share() -> None:
    whole = stack(2).state_dict()
    with torch.device("meta"):
        empty = Stack(2).double()
    ep_module.shard_experts(empty, pair(1))
    ep_module.load_full_state_dict(empty, whole, assign=True)
    down = empty.layers[1].experts.down_proj
    assert torch.equal(down, whole["layers.1.experts.down_proj"][4:])
    assert down.untyped_storage().nbytes() == down.nbytes


def test_refusals() -> None:
    with pytest.raises(ValueError, match="7 routed experts"):
        ep_module.ParallelExperts(Experts(7, 4, 4), pair())
    with pytest.raises(ValueError, match=r"'ring', allowed: \['all_gather', 'all_to_all'\]"):
        ep_module.ParallelExperts(Experts(8, 4, 4), pair(), "ring")
    model = stack(2)
    ep_module.shard_experts(model, pair(1))
    assert torch.equal(model.layers[0].experts.down_proj, stack(2).layers[0].experts.down_proj[4:])
    with pytest.raises(ValueError, match="shared out already"):
        ep_module.shard_experts(model, pair(1))
    short = stack(2).state_dict()
    short["layers.1.experts.down_proj"] = short["layers.1.experts.down_proj"][:4]
    with pytest.raises(ValueError, match="all 8 experts"):
        ep_module.load_full_state_dict(model, short)
