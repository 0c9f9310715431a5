"""Routers: the contract's steps, score functions at any logit, groups, hashes, the bias. training.md 1.6, 3.2."""

import itertools

import pytest
import torch

from meshspark.models.moe.router import GroupLimitedRouter, HashRouter, Router, TopKRouter
from meshspark.models.moe.scores import SCORES, SUM_FLOOR, limit_groups, score_function, sqrt_softplus, weigh

T, H, E, K = 24, 16, 8, 3


def tokens(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def router(score: str = "sqrtsoftplus", **options) -> TopKRouter:
    torch.manual_seed(1)
    made = TopKRouter(H, E, K, score, **options)
    made.reset_parameters(0.5)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("score", list(SCORES))
def test_every_score_keeps_the_contract(score: str, dtype: torch.dtype) -> None:
    scores, indices, weights = router(score, route_scale=1.5).to(dtype)(tokens(dtype))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (scores.shape, indices.shape, weights.shape) == ((T, E), (T, K), (T, K))
    assert (scores.dtype, indices.dtype, weights.dtype) == (wide, torch.int64, wide)
    torch.testing.assert_close(weights.sum(1), torch.full((T,), 1.5, dtype=wide))
    assert all(len(set(row)) == K for row in indices.tolist())
    best = scores.topk(K, dim=1).indices.sort(1).values
    assert torch.equal(indices.sort(1).values, best)


def test_steps_can_be_overridden_one_by_one() -> None:
    class First(Router):
        def logits(self, x_TH):
            return x_TH[:, : self.num_experts]

        def score(self, logits_TE):
            return logits_TE.exp()

        def routing_weights(self, scores_TE, indices_TK):
            return scores_TE.gather(1, indices_TK)

    x = tokens()
    scores, indices, weights = First(E, K)(x)
    assert torch.equal(scores, x[:, :E].exp())
    assert torch.equal(weights, scores.topk(K, dim=1).values) and torch.equal(weights, scores.gather(1, indices))
    with pytest.raises(NotImplementedError, match="Router has no logits"):
        Router(E, K)(x)


def test_without_renormalisation_weights_are_scaled_scores() -> None:
    scores, indices, weights = router("sigmoid", normalize=False, route_scale=2.0)(tokens())
    assert torch.equal(weights, 2 * scores.gather(1, indices))


def test_logits_are_wide_whatever_autocast_says() -> None:
    made, x = router(), tokens(torch.bfloat16)
    plain = made(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = made(x)
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))
    torch.testing.assert_close(plain[0], sqrt_softplus(x.float() @ made.weight.T))


@pytest.mark.parametrize("score", list(SCORES))
def test_bias_moves_picks_and_never_weights(score: str) -> None:
    plain, shifted = router(score), router(score, enable_expert_bias=True)
    shifted.expert_bias.copy_(torch.tensor([9.0, 9, 9, 0, 0, 0, 0, 0]))
    scores, indices, _ = plain(tokens())
    moved_scores, moved, weights = shifted(tokens())
    assert torch.equal(scores, moved_scores)
    assert not torch.equal(indices.sort(1).values, moved.sort(1).values)
    assert torch.equal(moved.sort(1).values, torch.tensor([[0, 1, 2]]).expand(T, 3))
    assert torch.equal(weights, weigh(scores, moved, 1.0))
    # A shift of all experts alike moves nothing at all.
    shifted.expert_bias.fill_(0.25)
    same = shifted(tokens())
    assert torch.equal(same[1], indices) and torch.equal(same[2], plain(tokens())[2])


def test_no_gradient_reaches_the_bias_or_passes_through_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    made, select = router(enable_expert_bias=True), TopKRouter.select

    def without_graph(self, choice, *given):
        assert not choice.requires_grad
        return select(self, choice, *given)

    monkeypatch.setattr(TopKRouter, "select", without_graph)
    router()(tokens())
    monkeypatch.undo()
    made.expert_bias.requires_grad_()
    scores, _, weights = made(tokens())
    (scores.sum() + weights.square().sum()).backward()
    assert made.expert_bias.grad is None and made.weight.grad is not None


def test_ties_go_to_the_lowest_expert() -> None:
    made = TopKRouter(H, 64, K)
    made.reset_parameters(0.0)
    assert torch.equal(made(tokens())[1], torch.arange(K).expand(T, K))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", list(SCORES))
def test_scores_and_gradients_are_finite_at_any_logit(score: str, dtype: torch.dtype) -> None:
    for logit in (-1e30, -1e4, -800.0, -200.0, -104.0, -103.5, -88.0, -1.0, 0.0, 1.0, 88.0, 200.0, 1e4, 1e30):
        logits = torch.full((2, E), logit, dtype=dtype, requires_grad=True)
        scores = score_function(score)(logits)
        weights = weigh(scores, torch.tensor([[0, 1], [2, 3]]), 1.5)
        (weights * torch.tensor([1.0, -2.0], dtype=dtype)).sum().backward()
        assert scores.isfinite().all() and weights.isfinite().all(), logit
        assert logits.grad is not None and logits.grad.isfinite().all(), logit
        if logit == -200 and dtype == torch.float32 and score == "sqrtsoftplus":
            assert not logits.grad.any()


def test_gradient_of_sqrtsoftplus_is_its_slope() -> None:
    logits = torch.tensor([-700.0, -60, -20, -3, -1e-9, 0.0, 1e-9, 0.5, 3, 19, 21, 40, 300], dtype=torch.float64)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(sqrt_softplus, logits)
    sqrt_softplus(logits).sum().backward()
    small = logits.detach().clone().float().requires_grad_()
    sqrt_softplus(small).sum().backward()
    assert logits.grad is not None and small.grad is not None
    # The exact slope: sigmoid(l) / (2 sqrt(softplus(l))), by the stable log-sum-exp.
    zero = torch.zeros_like(logits)
    exact = logits.detach().sigmoid() / (2 * torch.logaddexp(logits.detach(), zero).sqrt())
    torch.testing.assert_close(logits.grad, exact, rtol=1e-13, atol=0)
    torch.testing.assert_close(small.grad.double(), exact, rtol=1e-6, atol=1e-22)


def test_values_do_not_depend_on_whether_a_gradient_is_wanted() -> None:
    logits = torch.linspace(-120, 120, 4001)
    assert torch.equal(sqrt_softplus(logits), sqrt_softplus(logits.clone().requires_grad_()).detach())


@pytest.mark.parametrize("score", list(SCORES))
def test_router_gradients_against_fp64(score: str) -> None:
    grads = []
    for dtype in (torch.float32, torch.float64):
        made, x = router(score).to(dtype), tokens(dtype).requires_grad_()
        scores, indices, weights = made(x)
        slope = torch.arange(T * K, dtype=dtype).view(T, K).cos()
        ((weights * slope).sum() + scores.square().sum()).backward()
        grads.append((made.weight.grad.double(), x.grad.double(), indices))
    assert torch.equal(grads[0][2], grads[1][2])
    for single, double in zip(grads[0][:2], grads[1][:2], strict=True):
        torch.testing.assert_close(single, double, rtol=1e-5, atol=1e-6)


def test_router_passes_gradcheck() -> None:
    made = router("sqrtsoftplus", route_scale=1.5, enable_expert_bias=True).double()
    made.expert_bias.copy_(torch.linspace(-0.2, 0.2, E))
    x = tokens(torch.float64)[:5].requires_grad_()

    def call(x, weight):
        scores, _, weights = torch.func.functional_call(made, {"weight": weight}, (x,))
        return scores, weights

    assert torch.autograd.gradcheck(call, (x, made.weight.detach().clone().requires_grad_()), fast_mode=True)


def test_guard_changes_no_bit_of_softmax() -> None:
    scores = torch.softmax(4 * tokens()[:, :E], dim=1)
    indices = scores.topk(K, dim=1).indices
    chosen = scores.gather(1, indices)
    assert torch.equal(weigh(scores, indices, 1.0), chosen / chosen.sum(1, keepdim=True))
    assert SUM_FLOOR == 1e-20
    assert torch.equal(weigh(torch.zeros(1, E), torch.tensor([[0, 1]]), 1.5), torch.zeros(1, 2))


def _brute_force(choice: list[float], groups: int, kept: int, top_k: int) -> set[int]:
    """Experts of the best admissible groups, by trying every set of groups and every set of experts."""
    size = len(choice) // groups

    def worth(group: int) -> float:
        members = choice[group * size : (group + 1) * size]
        return max(a + b for a, b in itertools.combinations(members, 2))

    opened = max(itertools.combinations(range(groups), kept), key=lambda some: sum(map(worth, some)))
    members = [e for e in range(len(choice)) if e // size in opened]
    return set(max(itertools.combinations(members, top_k), key=lambda some: sum(choice[e] for e in some)))


@pytest.mark.parametrize("groups, kept, top_k", [(4, 2, 3), (2, 1, 4), (4, 4, 5), (3, 1, 2)])
def test_group_limited_equals_brute_force(groups: int, kept: int, top_k: int) -> None:
    """The router never tells `select` that there is a bias: the shifted scores are all that it sees."""
    torch.manual_seed(2)
    made = GroupLimitedRouter(H, 12, top_k, groups, kept, score="sigmoid", enable_expert_bias=True)
    made.reset_parameters(0.5)
    x, differs = tokens(), 0
    for bias in (torch.zeros(12), torch.linspace(0.3, -0.3, 12)):
        made.expert_bias.copy_(bias)
        scores, indices, weights = made(x)
        choice = scores.detach() + bias
        for row, picks in zip(choice.tolist(), indices.tolist(), strict=True):
            assert set(picks) == _brute_force(row, groups, kept, top_k)
            differs += set(picks) != set(torch.tensor(row).topk(top_k).indices.tolist())
        assert torch.equal(weights, weigh(scores, indices, 1.0))
    assert bool(differs) == (kept < groups)


def test_limited_groups_shut_out_scores_below_zero_too() -> None:
    choice = torch.tensor([[-1.0, -2.0, -3.0, -9.0, -0.5, -8.0]])
    limited = limit_groups(choice, 3, 1)
    assert limited.tolist() == [[-1.0, -2.0, -torch.inf, -torch.inf, -torch.inf, -torch.inf]]


def test_hash_router_looks_experts_up() -> None:
    torch.manual_seed(3)
    made = HashRouter(H, E, K, vocab_size=11)
    table = torch.stack([torch.randperm(E)[:K] for _ in range(11)])
    made.load_state_dict({"weight": made.weight, "tid2eid": table.int()}, assign=True)
    ids = torch.arange(T) % 11
    scores, indices, weights = made(tokens(), token_ids=ids.view(2, -1))
    assert torch.equal(indices, table[ids]) and indices.dtype == torch.int64
    assert torch.equal(weights, weigh(scores, table[ids], 1.0))
    with pytest.raises(ValueError, match="a hash router needs token_ids"):
        made(tokens())
    with pytest.raises(ValueError, match="moe_router_enable_expert_bias"):
        HashRouter(H, E, K, 11, enable_expert_bias=True)


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: torch.nn.Sequential(m).bfloat16()[0],
        lambda m: m.bfloat16().float(),
    ],
)
def test_bias_survives_casts_bit_for_bit(cast) -> None:
    made = router(enable_expert_bias=True, bias_update_rate=1e-3)
    value = torch.linspace(-1, 1, E) / 3
    made.expert_bias.copy_(value)
    made = cast(made)
    assert made.expert_bias.dtype == torch.float32 and torch.equal(made.expert_bias, value)
    assert torch.equal(made.state_dict()["expert_bias"], value)
    x = tokens(made.weight.dtype)
    assert all(part.isfinite().all() for part in made(x))
    made.update_expert_bias(torch.arange(E))
    assert made.expert_bias.dtype == torch.float32 and not torch.equal(made.expert_bias, value)


@pytest.mark.parametrize("assign", [False, True])
def test_bias_is_loaded_in_fp32_from_any_dtype(assign: bool) -> None:
    with torch.device("meta"):
        made = router(enable_expert_bias=True)
    assert made.expert_bias.is_meta
    if not assign:
        made.to_empty(device="cpu")
    state = {"weight": torch.ones(E, H), "expert_bias": torch.arange(E).bfloat16()}
    made.load_state_dict(state, assign=assign)
    assert made.expert_bias.dtype == torch.float32 and torch.equal(made.expert_bias, torch.arange(E).float())
    assert state["expert_bias"].dtype == torch.bfloat16


def test_without_a_bias_the_state_has_none() -> None:
    assert set(router().state_dict()) == {"weight"}
    assert set(router(enable_expert_bias=True).state_dict()) == {"weight", "expert_bias"}
    with pytest.raises(ValueError, match="no expert_bias"):
        router().update_expert_bias(torch.arange(E))


def test_bias_step() -> None:
    made = TopKRouter(H, 4, 1, enable_expert_bias=True, bias_update_rate=1e-3)
    made.update_expert_bias(torch.tensor([10, 2, 3, 1]))
    torch.testing.assert_close(made.expert_bias, 1e-3 * torch.tensor([-1.5, 0.5, 0.5, 0.5]))
    made.update_expert_bias(torch.zeros(4, dtype=torch.int64))
    made.update_expert_bias(torch.full((4,), 7))
    torch.testing.assert_close(made.expert_bias, 1e-3 * torch.tensor([-1.5, 0.5, 0.5, 0.5]))


def test_bias_step_is_exact_for_large_counts() -> None:
    """One token more than the mean counts, where FP32 would round it away."""
    made = TopKRouter(H, 4, 1, enable_expert_bias=True, bias_update_rate=1.0)
    made.update_expert_bias(torch.tensor([2**40 + 1, 2**40 - 1, 2**40, 2**40]))
    assert made.expert_bias.tolist() == [-1.0, 1.0, 0.0, 0.0]


def test_bias_steps_do_not_drift() -> None:
    made = router(enable_expert_bias=True, bias_update_rate=1e-3)
    generator = torch.Generator().manual_seed(4)
    for _ in range(300):
        made.update_expert_bias(torch.randint(0, 50, (E,), generator=generator) ** 3)
    assert abs(float(made.expert_bias.double().mean())) < 1e-8 < 1e-3 < float(made.expert_bias.abs().max())


def test_rate_zero_keeps_a_loaded_bias() -> None:
    made = router(enable_expert_bias=True)
    made.expert_bias.copy_(torch.arange(E))
    made.update_expert_bias(torch.arange(E))
    assert torch.equal(made.expert_bias, torch.arange(E).float())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TopKRouter(H, E, K, "relu"), "scoring_func is 'relu', allowed: 'softmax', 'sigmoid', 'sqrtsoftplus'"),
        (lambda: TopKRouter(H, E, E + 1), "top_k is 9, allowed: 1 to num_experts 8"),
        (lambda: TopKRouter(H, E, 0), "top_k is 0, allowed: 1 to num_experts 8"),
        (lambda: TopKRouter(0, E, K), "hidden_size is 0, allowed: 1 or more"),
        (
            lambda: router(bias_update_rate=1e-3),
            "bias_update_rate is 0.001, allowed: 0, for .*enable_expert_bias is off",
        ),
        (
            lambda: router(enable_expert_bias=True, bias_update_rate=-1.0),
            "bias_update_rate is -1.0, allowed: 0 or more",
        ),
        (lambda: GroupLimitedRouter(H, E, K, 3, 1), "num_groups is 3, allowed: a divisor of 8 experts"),
        (lambda: GroupLimitedRouter(H, E, K, 8, 8), "num_groups is 8, allowed: groups of 2 experts or more of 8"),
        (lambda: GroupLimitedRouter(H, E, K, 2, None), "topk_group is None, allowed: 1 to num_groups 2"),
        (lambda: GroupLimitedRouter(H, E, K, 2, 3), "topk_group is 3, allowed: 1 to num_groups 2"),
        (lambda: GroupLimitedRouter(H, E, K, 4, 1), "topk_group is 1, allowed: groups with top_k 3 experts in all"),
        (lambda: router(enable_expert_bias=True, bias_update_rate=1.0).update_expert_bias(torch.ones(E)), "int64"),
        (lambda: router(enable_expert_bias=True, bias_update_rate=1.0).update_expert_bias(torch.arange(3)), r"\[8\]"),
    ],
)
def test_refusals_name_the_field(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
