"""Routed experts: both forms, repeats, unused experts, empty batches. training.md 2.2, 2.3."""

import pytest
import torch
import torch.nn.functional as F

from meshspark.models.functions import silu
from meshspark.models.moe.experts import Experts, expert_rows, grouped_linear, loop_linear, sort_routes
from meshspark.models.moe.layer import GatedMLP, SharedExpert
from meshspark.models.moe.scores import clamped_swiglu

T, H, W, E, K = 29, 16, 8, 6, 2
BACKENDS = ("grouped", "loop")
UNALIGNED = (10, 6)
"""Hidden and width whose rows torch's grouped product does not take."""


def experts(dtype: torch.dtype, limit: float | None = None, sizes: tuple[int, int] = (H, W)) -> Experts:
    torch.manual_seed(0)
    made = Experts(E, *sizes, limit)
    made.reset_parameters(0.6)
    return made.to(dtype)


def routes(dtype: torch.dtype, hidden: int = H, num_tokens: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, experts and weights; expert 4 gets nobody, expert 1 most of them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, hidden, generator=generator, dtype=torch.float64)
    first = torch.where(torch.rand(num_tokens, generator=generator) < 0.7, 1, 5)
    other = torch.tensor([0, 2, 3])[torch.randint(0, 3, (num_tokens,), generator=generator)]
    weights = torch.rand(num_tokens, K, generator=generator, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    return x.to(dtype).requires_grad_(), torch.stack((first, other), 1), weights.to(wide).requires_grad_()


def written_out(made: Experts, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Every token through each of its experts, one at a time, as in training.md 2.2."""
    rows = []
    for t, row in enumerate(x):
        total = torch.zeros_like(row)
        for k, e in enumerate(indices[t].tolist()):
            gate, up = (made.gate_up_proj[e] @ row).chunk(2)
            if made.limit:
                gate, up = gate.clamp(max=made.limit), up.clamp(-made.limit, made.limit)
            total = total + weights[t, k] * (made.down_proj[e] @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def outcome(made: Experts, call, dtype: torch.dtype, num_tokens: int = T) -> list[torch.Tensor]:
    """The output and the gradients by tokens, weights and both stacks."""
    x, indices, weights = routes(dtype, made.gate_up_proj.shape[2], num_tokens)
    made.zero_grad(set_to_none=True)
    y = call(x, indices, weights)
    (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum().backward()
    return [y.detach(), x.grad, weights.grad, made.gate_up_proj.grad, made.down_proj.grad]


@pytest.mark.parametrize("sizes", [(H, W), UNALIGNED])
@pytest.mark.parametrize("limit", [None, 0.0, 0.5])
def test_both_forms_equal_the_sum_written_out(limit: float | None, sizes: tuple[int, int]) -> None:
    made = experts(torch.float64, limit, sizes)
    expected = outcome(made, lambda *given: written_out(made, *given), torch.float64)
    for backend in BACKENDS:
        made.backend = backend
        for found, wanted in zip(outcome(made, made, torch.float64), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_clamp_is_seen() -> None:
    plain, clamped = experts(torch.float64), experts(torch.float64, 0.5)
    x, indices, weights = routes(torch.float64)
    assert (plain(x, indices, weights) - clamped(x, indices, weights)).abs().max() > 0.1


@pytest.mark.parametrize("sizes", [(H, W), UNALIGNED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_dtypes_against_fp64(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    made = experts(dtype, 0.8, sizes)
    double = experts(torch.float64, 0.8, sizes)
    double.load_state_dict(made.state_dict())
    tolerance = {"rtol": 2e-2, "atol": 4e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-6}
    x, indices, weights = routes(dtype, sizes[0])
    for backend in BACKENDS:
        made.backend = backend
        y = made(x, indices, weights)
        wanted = double(x.detach().double(), indices, weights.detach().double())
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), wanted, **tolerance)
        made.zero_grad(), double.zero_grad()
        y.double().square().sum().backward(), wanted.square().sum().backward()
        for one, two in zip(made.parameters(), double.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None
            off = (one.grad.double() - two.grad).norm() / two.grad.norm()
            assert off < (2e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_repeats_give_equal_bits(backend: str, dtype: torch.dtype) -> None:
    made = experts(dtype, 0.8)
    made.backend = backend
    first = outcome(made, made, dtype, 400)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(outcome(made, made, dtype, 400), first, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_unused_experts_have_gradients_of_zeros(backend: str, dtype: torch.dtype) -> None:
    made = experts(dtype)
    made.backend = backend
    _, _, _, gate_up, down = outcome(made, made, dtype)
    for grad in (gate_up, down):
        used = grad.flatten(1).any(1)
        assert used.tolist() == [True, True, True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_keep_the_graph(backend: str, dtype: torch.dtype) -> None:
    made = experts(dtype)
    made.backend = backend
    y, x_grad, weights_grad, gate_up, down = outcome(made, made, dtype, 0)
    assert y.shape == x_grad.shape == (0, H) and weights_grad.shape == (0, K)
    assert gate_up is not None and down is not None and not gate_up.any() and not down.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend: str) -> None:
    made = experts(torch.float64, 0.8)
    made.backend = backend
    x, indices, weights = routes(torch.float64, num_tokens=5)
    values = {name: p.detach().clone().requires_grad_() for name, p in made.named_parameters()}

    def call(x, weights, gate_up, down):
        state = {"gate_up_proj": gate_up, "down_proj": down}
        return torch.func.functional_call(made, state, (x, indices, weights))

    assert torch.autograd.gradcheck(call, (x, weights, values["gate_up_proj"], values["down_proj"]), fast_mode=True)


@pytest.mark.parametrize("sizes", [(H, W), UNALIGNED])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_reaches_both_forms(backend: str, given: torch.dtype, sizes: tuple[int, int]) -> None:
    """FP32 weights under autocast give what BF16 weights give."""
    made, low = experts(torch.float32, 0.8, sizes), experts(torch.bfloat16, 0.8, sizes)
    made.backend = low.backend = backend
    x, indices, weights = routes(torch.bfloat16, sizes[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = made(x.detach().to(given), indices, weights)
    assert y.dtype == torch.bfloat16 and torch.equal(y, low(x, indices, weights))
    double = experts(torch.float64, 0.8, sizes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert double(*routes(torch.float64, sizes[0])).dtype == torch.float64


def test_routes_are_sorted_by_expert_then_token() -> None:
    order, inverse, counts = sort_routes(torch.tensor([[2, 0], [0, 1], [2, 1]]), 4)
    assert order.tolist() == [1, 2, 3, 5, 0, 4] and counts.tolist() == [2, 2, 2, 0]
    assert torch.equal(order[inverse], torch.arange(6))


@pytest.mark.parametrize("dtype, sizes", [(torch.float64, (H, W)), (torch.float32, (H, W)), (torch.float32, UNALIGNED)])
def test_grouped_product_equals_the_loop_at_every_border(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(4, sizes[1], sizes[0], generator=generator, dtype=torch.float64).to(dtype)
    for counts in ([3, 0, 5, 1], [0, 0, 0, 7], [9, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]):
        x = torch.randn(sum(counts), sizes[0], generator=generator, dtype=torch.float64).to(dtype)
        pair = [form(x, weight, torch.tensor(counts)) for form in (grouped_linear, loop_linear)]
        torch.testing.assert_close(*pair, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)


def test_fp32_takes_torchs_grouped_product_and_never_asks_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grouped form of aligned FP32 reads no count back; the loop, which does, trips over the same wire."""
    made, called = experts(torch.float32), []
    grouped_mm = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *given, **more: called.append(1) or grouped_mm(*given, **more))

    def refuse(*given):
        raise AssertionError("read back")

    given = routes(torch.float32)
    for name in ("tolist", "item", "__int__", "__bool__", "cpu", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for where in (torch, torch.Tensor):
        monkeypatch.setattr(where, "bincount", lambda *given, **more: refuse())
    made(*given)
    assert len(called) == 2
    made.backend = "loop"
    with pytest.raises(AssertionError, match="read back"):
        made(*given)


def test_expert_rows_take_a_share_of_the_experts() -> None:
    """What an expert rank does with the rows of its own: a slice of the stacks gives the same rows."""
    made = experts(torch.float64, 0.8)
    x = routes(torch.float64)[0]
    counts = torch.tensor([5, 4, 3, 2, 0, 15])
    whole = expert_rows(x, counts, made.gate_up_proj, made.down_proj, made.limit, "grouped")
    half = expert_rows(x[12:], counts[3:], made.gate_up_proj[3:], made.down_proj[3:], made.limit, "loop")
    torch.testing.assert_close(whole[12:], half, rtol=1e-12, atol=1e-12)


def test_clamped_swiglu_clamps_the_gate_from_above_only() -> None:
    gate, up = torch.tensor([-20.0, 20.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 20.0, -20.0])
    expected = F.silu(torch.tensor([-20.0, 10.0, 1.0, 1.0])) * torch.tensor([1.0, 1.0, 10.0, -10.0])
    torch.testing.assert_close(clamped_swiglu(gate, up, 10.0), expected)
    for off in (None, 0.0, -1.0):
        torch.testing.assert_close(clamped_swiglu(gate, up, off), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_of_the_gate_is_finite_where_exp_overflows(dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e30, -800.0, -200.0, -89.0, -5.0, 0.0, 9.0, 30.0], dtype=dtype, requires_grad=True)
    up = torch.full_like(gate, 0.5, requires_grad=True)
    clamped_swiglu(gate, up, 10.0).sum().backward()
    plain = gate.detach().clone().requires_grad_()
    (F.silu(plain.clamp(max=10.0)) * 0.5).sum().backward()
    torch.testing.assert_close(gate.grad, plain.grad)
    torch.testing.assert_close(up.grad, silu(gate.detach().clamp(max=10.0)))


def test_values_do_not_depend_on_whether_a_gradient_is_wanted() -> None:
    gate = torch.linspace(-120, 12, 3001)
    up = torch.linspace(-11, 11, 3001)
    graph = clamped_swiglu(gate.clone().requires_grad_(), up, 10.0).detach()
    assert torch.equal(clamped_swiglu(gate, up, 10.0), graph)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_dense_network_and_shared_expert(limit: float | None) -> None:
    torch.manual_seed(3)
    made = SharedExpert(H, W, limit).double()
    made.reset_parameters(0.6)
    assert isinstance(made, GatedMLP) and [n for n, _ in made.named_parameters()] == [
        "gate_proj.weight",
        "up_proj.weight",
        "down_proj.weight",
    ]
    x = torch.randn(2, 3, H, dtype=torch.float64, requires_grad=True)
    gate, up = x @ made.gate_proj.weight.T, x @ made.up_proj.weight.T
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    torch.testing.assert_close(made(x), (F.silu(gate) * up) @ made.down_proj.weight.T, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(made, x, fast_mode=True)
    assert made.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Experts(0, H, W), "num_experts is 0, allowed: 1 or more"),
        (lambda: Experts(E, 0, W), "hidden is 0"),
        (lambda: Experts(E, H, -1), "width is -1"),
        (lambda: Experts(E, H, W, backend="batched"), "backend is 'batched', allowed: 'grouped', 'loop'"),
    ],
)
def test_refusals_name_the_field(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
