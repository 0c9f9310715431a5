"""Mixture layers: counts, masks, gradients; the same as transformers' and as the target's own. training.md 2.7, 3.1."""

import os

import pytest
import torch
from moe_layers import BACKENDS, QWEN, V4, B, E, H, K, Q, W, hidden, layer

from meshspark.models.functions import silu, softplus
from meshspark.models.moe.experts import Experts
from meshspark.models.moe.layer import MoELayer, SharedExpert
from meshspark.models.moe.router import HashRouter, Router
from meshspark.models.moe.scores import SUM_FLOOR
from meshspark.models.v4 import moe as target
from meshspark.parallel.groups import Groups

# Counting.


def test_counts_are_exact_and_add_up_over_forwards() -> None:
    made, x = layer(V4), hidden()
    expected = torch.zeros(E, dtype=torch.int64)
    for _ in range(2):
        made(x)
        expected += torch.bincount(made.gate(x.flatten(0, 1))[1].flatten(), minlength=E)
    assert made.tokens_per_expert.dtype == torch.int64 and torch.equal(made.tokens_per_expert, expected)
    made.reset_counts()
    assert not made.tokens_per_expert.any()


def test_masked_tokens_are_routed_and_not_counted() -> None:
    made, x = layer(V4), hidden()
    mask = torch.tensor([[True, True, False, False, True, False], [False] * 6])
    assert torch.equal(made(x, mask), layer(V4)(x))
    indices = made.gate(x.flatten(0, 1))[1]
    assert torch.equal(made.tokens_per_expert, torch.bincount(indices[mask.flatten()].flatten(), minlength=E))
    made.reset_counts()
    made(x, torch.zeros_like(mask))
    assert not made.tokens_per_expert.any()


def test_eval_mode_does_not_count() -> None:
    made = layer(V4, moe_router_aux_loss_coef=0.1).eval()
    made(hidden())
    assert not made.tokens_per_expert.any() and made.aux_loss is None


def test_counter_survives_casts_and_is_not_in_the_state() -> None:
    made = layer(V4)
    made(hidden())
    counts = made.tokens_per_expert.clone()
    for cast in (MoELayer.bfloat16, MoELayer.half, MoELayer.double):
        assert cast(made).tokens_per_expert.dtype == torch.int64 and torch.equal(made.tokens_per_expert, counts)
    assert "tokens_per_expert" not in made.state_dict()


def test_auxiliary_hook_sees_the_routing_and_only_where_it_is_asked_for() -> None:
    calls: list[tuple] = []

    def hook(scores, indices, mask):
        calls.append((scores, indices, mask))
        return scores.sum()

    made, x = layer(V4, moe_router_aux_loss_coef=0.1), hidden()
    with pytest.raises(ValueError, match=r"moe_router_aux_loss_coef is 0.1, .*attach MoEBalancing"):
        made(x)
    made.reset_counts()
    made.aux = hook
    mask = torch.arange(B * Q).view(B, Q) < 5
    made(x, mask)
    ((scores, indices, seen),) = calls
    assert torch.equal(scores, made.gate(x.flatten(0, 1))[0]) and scores.requires_grad
    assert torch.equal(indices, made.gate(x.flatten(0, 1))[1]) and torch.equal(seen, mask.flatten())
    # The hook runs after the count of its own forward.
    assert made.tokens_per_expert.sum() == 5 * K
    assert made.aux_loss is not None and made.aux_loss.requires_grad
    made.reset_counts()
    assert made.aux_loss is None
    plain = layer(V4)
    plain.aux = hook
    plain(x)
    assert len(calls) == 1 and plain.aux_loss is None


# Forward.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("base", [V4, QWEN])
def test_gradients_against_fp64(base: dict, backend: str) -> None:
    pair = []
    for dtype in (torch.float32, torch.float64):
        made, x = layer(base, dtype=dtype, moe_router_enable_expert_bias=True), hidden(dtype).requires_grad_()
        made.experts.backend = backend
        y = made(x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum().backward()
        pair.append({"y": y, "x": x.grad, **{name: p.grad for name, p in made.named_parameters()}})
    for name, single in pair[0].items():
        assert single is not None and single.any(), name
        torch.testing.assert_close(single.double(), pair[1][name], rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("base", [V4, QWEN])
def test_gradcheck(base: dict) -> None:
    made = layer(base, dtype=torch.float64, moe_router_enable_expert_bias=True)
    x = hidden(torch.float64)[:, :2].requires_grad_()
    names = [name for name, _ in made.named_parameters()]
    values = tuple(p.detach().clone().requires_grad_() for p in made.parameters())

    def call(x, *values):
        return torch.func.functional_call(made, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *values), fast_mode=True)


def test_no_tokens_keep_the_graph() -> None:
    for base in (V4, QWEN):
        made = layer(base)
        y = made(hidden()[:, :0])
        y.sum().backward()
        assert y.shape == (B, 0, H)
        assert all(p.grad is not None and not p.grad.any() for p in made.parameters())


@pytest.mark.parametrize("base", [V4, QWEN])
def test_bfloat16_stays_near_fp32(base: dict) -> None:
    made = layer(base, moe_router_enable_expert_bias=True)
    low = layer(base, dtype=torch.bfloat16, moe_router_enable_expert_bias=True)
    made.load_state_dict(low.state_dict())
    x = hidden(torch.bfloat16)
    wanted = made(x.float())
    for backend in BACKENDS:
        low.experts.backend = backend
        found = low(x)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2 * float(wanted.detach().abs().max()))


def test_any_router_fits() -> None:
    """A router of another kind, with token ids, through the same layer."""

    class Everything(Router):
        def logits(self, x_TH):
            return x_TH.new_zeros(len(x_TH), self.num_experts)

        def score(self, logits_TE):
            return logits_TE + 1

    torch.manual_seed(2)
    experts, x = Experts(E, H, W), hidden()
    y = MoELayer(Everything(E, E), experts)(x)
    mean = torch.stack([MoELayer(Everything(1, 1), _one(experts, e))(x) for e in range(E)]).mean(0)
    torch.testing.assert_close(y, mean)
    table = MoELayer(HashRouter(H, E, K, vocab_size=5), experts)
    table.gate.tid2eid.copy_(torch.arange(15).view(5, 3) % E)
    ids = torch.arange(B * Q).view(B, Q) % 5
    table(x, None, ids)
    counts = torch.bincount(table.gate.tid2eid[ids].flatten(), minlength=E)
    assert torch.equal(table.tokens_per_expert, counts)
    with pytest.raises(ValueError, match="token_ids"):
        table(x)


def _one(experts: Experts, index: int) -> Experts:
    alone = Experts(1, H, W)
    alone.load_state_dict({name: p[index : index + 1] for name, p in experts.state_dict().items()})
    return alone


# The same as transformers.


def _hf_v4(dtype: torch.dtype) -> torch.nn.Module:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    pytest.importorskip("transformers", minversion="5.24")
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock

    made = DeepseekV4Config(
        hidden_size=H,
        moe_intermediate_size=W,
        n_routed_experts=E,
        num_experts_per_tok=K,
        num_hidden_layers=1,
        mlp_layer_types=["moe"],
        scoring_func="sqrtsoftplus",
        routed_scaling_factor=1.5,
        swiglu_limit=0.6,
    )
    made._experts_implementation = "eager"
    return DeepseekV4SparseMoeBlock(made, 0).to(dtype)


def _hf_qwen(dtype: torch.dtype) -> torch.nn.Module:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    pytest.importorskip("transformers", minversion="5.24")
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

    made = Qwen3_5MoeTextConfig(
        hidden_size=H,
        moe_intermediate_size=W,
        shared_expert_intermediate_size=12,
        num_experts=E,
        num_experts_per_tok=K,
    )
    made._experts_implementation = "eager"
    return Qwen3_5MoeSparseMoeBlock(made).to(dtype)


HF_NAMES = {"gate.expert_bias": "gate.e_score_correction_bias", "shared_experts.": "shared_expert."}


def _hf_name(ours: str, base: dict) -> str:
    if base is V4:
        return HF_NAMES.get(ours, ours)
    return ours.replace("shared_experts.", HF_NAMES["shared_experts."])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("base, peer_of", [(V4, _hf_v4), (QWEN, _hf_qwen)])
def test_equals_transformers(base: dict, peer_of, dtype: torch.dtype, backend: str) -> None:
    """Values and gradients, with a bias that is not zero where the family has one; names as mapped above.

    The peer's softmax router computes in FP32 whatever its dtype.
    """
    biased = {"moe_router_enable_expert_bias": True} if base is V4 else {}
    made, peer = layer(base, dtype=dtype, **biased), peer_of(dtype)
    made.experts.backend = backend
    state = {_hf_name(name, base): value for name, value in made.state_dict().items()}
    assert set(state) == set(peer.state_dict())
    peer.load_state_dict(state)
    inner = 1e-6 if dtype == torch.float32 or base is QWEN else 1e-12
    x, peer_x = hidden(dtype).requires_grad_(), hidden(dtype).requires_grad_()
    y, wanted = made(x), peer(peer_x)
    torch.testing.assert_close(y, wanted, rtol=inner, atol=inner * float(wanted.detach().abs().max()))
    slope = torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)
    (y * slope).sum().backward(), (wanted * slope).sum().backward()
    theirs = dict(peer.named_parameters())
    pairs = [(x.grad, peer_x.grad), *((p.grad, theirs[_hf_name(n, base)].grad) for n, p in made.named_parameters())]
    assert len(pairs) == 1 + len(theirs)
    for found, expected in pairs:
        assert found is not None and expected is not None
        assert (found - expected).norm() <= 3 * inner * expected.norm()
    if base is V4:
        plain = layer(base, dtype=dtype)
        assert not torch.allclose(plain(x), y)


# The same as the target's own.


def test_rules_shared_with_the_target_have_its_bits() -> None:
    """The formulas as the target has spelled them since its own goldens were taken."""
    torch.manual_seed(4)
    gate, bias, x = torch.randn(E, H), torch.randn(E), 3 * torch.randn(40, H)
    router = target.LearnedRouter(gate, bias, K, 1.5)
    scores, indices, weights = router.forward(x)
    plain = softplus(x @ gate.T).sqrt()
    picks = torch.sort(plain + bias, dim=1, descending=True, stable=True).indices[:, :K]
    chosen = plain.gather(1, picks)
    assert torch.equal(scores, plain) and torch.equal(indices, picks)
    assert torch.equal(weights, chosen / (chosen.sum(1, keepdim=True) + SUM_FLOOR) * 1.5)
    up = torch.randn(40, E)
    spelled = silu(plain.clamp(max=0.6)) * up.clamp(-0.6, 0.6)
    assert torch.equal(target.clamped_swiglu(plain, up, 0.6), spelled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_targets_layer(dtype: torch.dtype) -> None:
    """Routing to the bit (rows by fours, as CPU products are), the mixture to rounding."""
    made, x = layer(V4, dtype=dtype, moe_router_enable_expert_bias=True), hidden(dtype)
    gate_up, down, shared = made.experts.gate_up_proj.detach(), made.experts.down_proj.detach(), made.shared_experts
    assert isinstance(shared, SharedExpert)
    experts = target.ExpertWeights(gate_up[:, :W], gate_up[:, W:], down)
    common = target.ExpertWeights(*(p.weight.detach() for p in (shared.gate_proj, shared.up_proj, shared.down_proj)))
    router = target.LearnedRouter(made.gate.weight.detach(), made.gate.expert_bias.to(dtype), K, 1.5)
    flat = x.flatten(0, 1)
    for ours, theirs in zip(made.gate(flat), router.forward(flat), strict=True):
        assert torch.equal(ours, theirs)
    its = target.MoELayer(router, experts, common, E, 0.6, dtype)
    wanted, counts = its.forward(flat, torch.arange(len(flat)), None, Groups.single().ep)
    inner = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(
        made(x).flatten(0, 1), wanted, rtol=inner, atol=inner * float(wanted.detach().abs().max())
    )
    assert torch.equal(made.tokens_per_expert, counts)


# Where CUDA is.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("base", [V4, QWEN])
def test_cuda_bfloat16_without_host_sync(base: dict) -> None:
    low = layer(base, dtype=torch.bfloat16, moe_router_enable_expert_bias=True).cuda()
    wide = layer(base, moe_router_enable_expert_bias=True)
    wide.load_state_dict(low.state_dict())
    x = hidden(torch.bfloat16).cuda()
    mask = torch.ones(B, Q, dtype=torch.bool, device="cuda")
    low(x, mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = low(x, mask)
        found.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = wide(x.cpu().float())
    torch.testing.assert_close(found.cpu().float(), wanted, rtol=2e-2, atol=2e-2 * float(wanted.detach().abs().max()))
    low.experts.backend = "loop"
    torch.testing.assert_close(low(x), found, rtol=2e-2, atol=2e-2 * float(wanted.detach().abs().max()))
