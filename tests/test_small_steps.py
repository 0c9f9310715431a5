"""What makes small steps fast has the values, bits and gradients of the plain form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshspark.models.v4 import moe
from meshspark.models.v4.config import V4Config, tiny
from meshspark.models.v4.hyper import sinkhorn
from meshspark.models.v4.moe import ExpertWeights, batch_rows, routed_experts
from meshspark.models.v4.rope import angles, frequencies, rotate, spread

COUNTS = [(1, 0, 0, 3), (0, 0, 5, 0), (4, 4, 4, 4), (1, 2, 1, 9), (1, 1, 1, 1)]


def plain_sinkhorn(logits_Thh: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    mix = torch.softmax(logits_Thh, dim=-1) + eps
    mix = mix / (mix.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(2, keepdim=True) + eps)
        mix = mix / (mix.sum(1, keepdim=True) + eps)
    return mix


@pytest.mark.parametrize("h", [2, 3, 4])
@pytest.mark.parametrize("rows", [0, 1, 4, 7])
@pytest.mark.parametrize("iterations", [1, 8])
def test_sinkhorn_is_rows_and_columns_in_turn(h: int, rows: int, iterations: int) -> None:
    logits = torch.randn(rows, h, h, dtype=torch.float64, generator=torch.Generator().manual_seed(h))
    # An eps that is seen: it must be in every sum.
    got, want = sinkhorn(logits, iterations, 1e-2), plain_sinkhorn(logits, iterations, 1e-2)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_sinkhorn_has_the_plain_gradient() -> None:
    logits = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = []
    for form in (sinkhorn, plain_sinkhorn):
        leaf = logits.clone().requires_grad_()
        form(leaf, 5, 1e-3)[:, 1].square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def expert_case(counts: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, ExpertWeights]:
    generator = torch.Generator().manual_seed(sum(counts))
    H, width, R = 40, 24, sum(counts)
    shapes = ((len(counts), width, H), (len(counts), width, H), (len(counts), H, width))
    weights = ExpertWeights(*(torch.randn(*shape, generator=generator).to(dtype) for shape in shapes))
    return torch.randn(R, H, generator=generator).to(dtype), torch.rand(R, generator=generator), weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS)
def test_a_batch_of_experts_has_the_bits_of_segments(
    counts: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, experts = expert_case(counts, dtype)
    monkeypatch.setattr(moe, "batch_rows", lambda *given: -(-max(counts) // 4) * 4)
    batched = routed_experts(x, weight, counts, experts, 10.0)
    monkeypatch.setattr(moe, "batch_rows", lambda *given: 0)
    assert torch.equal(batched, routed_experts(x, weight, counts, experts, 10.0))


@pytest.mark.parametrize("counts", COUNTS)
def test_a_batch_of_experts_has_the_gradients_of_segments(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rows in (-(-max(counts) // 4) * 4, 0):
        x, weight, experts = expert_case(counts, torch.float64)
        leaves = [t.requires_grad_() for t in (x, weight.double(), experts.w1, experts.w3, experts.w2)]
        monkeypatch.setattr(moe, "batch_rows", lambda *given, rows=rows: rows)
        routed_experts(leaves[0], leaves[1], counts, experts, 10.0).square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_which_form_pays() -> None:
    assert batch_rows((1, 0, 2, 1), 160, 64) == 4
    assert batch_rows((1, 5, 2, 1), 160, 64) == 8
    assert batch_rows((0, 0), 160, 64) == 0, "no rows"
    assert batch_rows((3, 0, 0, 0), 160, 64) == 0, "one expert is one product"
    assert batch_rows((900, 1, 1, 1), 160, 64) == 0, "uneven prefill"
    assert batch_rows((1,) * 6 + (0,) * 250, 4096, 2048) == 0, "large experts are read only where they are used"
    assert batch_rows((1, 1, 1, 1), 7, 5) == 0, "small matrices take another way through a batch"


@settings(deadline=None)
@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=9), st.sampled_from([0, 4]), st.booleans(), st.booleans())
def test_spread_angles_turn_like_angles_of_pairs(positions: list[int], ratio: int, inverse: bool, odd: bool) -> None:
    config: V4Config = tiny()
    plain = frequencies(config, ratio)
    width = config.qk_rope_head_dim + 6 + odd
    x = torch.randn(len(positions), 3, width, generator=torch.Generator().manual_seed(len(positions)))
    position_T = torch.tensor(positions)
    turned = []
    # Wider than the rows, as wide, and by pairs.
    for rates in (spread(plain, width + 5), spread(plain, width), plain):
        rotation = [part.unsqueeze(1) for part in angles(position_T, rates, torch.float32)]
        turned.append(rotate(x, *rotation, inverse=inverse))
    assert torch.equal(turned[0], turned[1]) and torch.equal(turned[0], turned[2])
    cos, sin = angles(position_T, plain, torch.float32)
    sin = -sin if inverse else sin
    a, b = x[..., -config.qk_rope_head_dim :: 2], x[..., 1 - config.qk_rope_head_dim :: 2]
    want = torch.stack((a * cos[:, None] - b * sin[:, None], a * sin[:, None] + b * cos[:, None]), dim=-1).flatten(-2)
    assert torch.equal(turned[0][..., -config.qk_rope_head_dim :], want)
    assert torch.equal(turned[0][..., : -config.qk_rope_head_dim], x[..., : -config.qk_rope_head_dim])
