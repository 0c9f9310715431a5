"""Tokens over an expert group and sums back: both strategies against the oracle and against one rank, gradients too."""

import pytest
import torch
from rank_pool import RankPools, from_bytes, to_bytes

from meshspark.comm import oracle
from meshspark.comm.tokens import STRATEGIES, collect_sums, spread_tokens
from meshspark.layouts.bits import same_bits
from meshspark.parallel.groups import Groups
from meshspark.parallel.ledger import Ledger
from meshspark.parallel.topology import Topology

EXPERTS, HIDDEN = 8, 5
ROWS = {"ragged": [4, 0, 7, 1], "alike": [3, 3, 3, 3], "none": [0, 0, 0, 0], "one": [0, 5, 0, 0]}


def routing(rows: list[int], k: int, how: str) -> list[torch.Tensor]:
    """Chosen experts [T, k] of all ranks."""
    generator = torch.Generator().manual_seed(k)
    chosen = []
    for count in rows:
        picks = torch.rand(count, EXPERTS, generator=generator).argsort(dim=1)[:, :k]
        if how == "one rank":
            picks = torch.arange(k).expand(count, k) % 2
        elif how == "holes":
            picks = torch.where(torch.rand(picks.shape, generator=generator) < 0.4, -1, picks)
        chosen.append(picks.clone())
    return chosen


def inputs(rows: list[int], k: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    xs = [torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64).to(dtype) for n in rows]
    return xs, [torch.rand(n, k, generator=generator, dtype=torch.float64) for n in rows]


def order(groups: Groups) -> None:
    """Rows, experts and weights in every bit as the oracle says, and sums of what the ranks make of them."""
    group = groups.ep
    me = group.rank
    cases = (1, "random", "bfloat16"), (3, "holes", "float64"), (6, "random", "bfloat16"), (2, "one rank", "float64")
    for strategy, kind, (k, how, name) in [(s, kind, case) for s in STRATEGIES for kind in ROWS for case in cases]:
        rows, dtype = ROWS[kind][: group.size], getattr(torch, name)
        chosen = routing(rows, k, how)
        xs, ws = inputs(rows, k, dtype)
        got = spread_tokens(xs[me], chosen[me], ws[me], group, EXPERTS, strategy=strategy, stage="tokens")
        places = oracle.spread_tokens(chosen, EXPERTS, strategy)
        here = torch.tensor([own for _, _, own in places[me]], dtype=torch.int64).reshape(-1, k)
        x = [xs[source][row] if row >= 0 else torch.zeros(HIDDEN, dtype=dtype) for source, row, _ in places[me]]
        w = [ws[source][row] if row >= 0 else torch.zeros(k).double() for source, row, _ in places[me]]
        assert torch.equal(got.indices_RK, here)
        assert same_bits(got.x_RH, torch.stack(x) if x else xs[0].new_zeros(0, HIDDEN))
        assert same_bits(got.weights_RK, torch.where(here >= 0, torch.stack(w) if w else torch.zeros(0, k), 0).double())
        made = [
            torch.tensor([[(100 * source + row) * (rank + 1.0)] * 2 for source, row, _ in received]).reshape(-1, 2)
            for rank, received in enumerate(places)
        ]
        back = collect_sums(made[me].to(dtype), got, stage="sums")
        wanted = oracle.collect_sums([m.to(dtype).float() for m in made], places, rows)[me]
        assert same_bits(back, wanted.to(dtype))
        # As the gradient of rows comes back: added in FP32, whatever the dtype.
        assert same_bits(got.way.collect(made[me].to(dtype), "gradient"), wanted.to(dtype))


def layer(
    x: torch.Tensor, w: torch.Tensor, chosen: torch.Tensor, matrices: torch.Tensor, group, strategy: str, **more: int
) -> torch.Tensor:
    """Experts that are one matrix each, over the group."""
    got = spread_tokens(x, chosen, w, group, EXPERTS, strategy=strategy, stage="tokens", **more)
    y = 0 * matrices.sum() * got.x_RH
    for expert, matrix in enumerate(matrices):
        share = torch.where(got.indices_RK == expert, got.weights_RK, 0).sum(1, keepdim=True)
        y = y + share * torch.tanh(got.x_RH @ matrix)
    return collect_sums(y, got, stage="sums")


def gradients(groups: Groups, kind: str, k: int, how: str, strategy: str, most_rows: bool) -> list:
    """Output and gradients of two layers on this rank, packed: x, weights, the own experts; twice the same bits."""
    group = groups.ep
    rows = ROWS[kind][: group.size]
    chosen, (xs, ws) = routing(rows, k, how)[group.rank], inputs(rows, k, torch.float64)
    generator = torch.Generator().manual_seed(3)
    matrices = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
    share = EXPERTS // group.size
    own = matrices[group.rank * share : (group.rank + 1) * share]
    more = {"most_rows": max(rows)} if most_rows else {}
    results = []
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in (xs[group.rank], ws[group.rank], own)]
        y = leaves[0]
        for _ in range(2):
            y = y + layer(y, leaves[1], chosen, leaves[2], group, strategy, **more)
        y.square().sum().backward()
        assert all(leaf.grad is not None for leaf in leaves)
        results.append([to_bytes(y), *(to_bytes(leaf.grad) for leaf in leaves)])
    assert results[0] == results[1]
    return results[0]


def loose(groups: Groups, strategy: str) -> list:
    """Rank 1's experts make nothing of their rows, without a graph; no rank waits, and all gradients are there."""
    group = groups.ep
    x, w = (t[group.rank].requires_grad_() for t in inputs([3, 3], 2, torch.float64))
    chosen = torch.tensor([[0, 7]] * 3)
    got = spread_tokens(x, chosen, w, group, EXPERTS, strategy=strategy, stage="tokens")
    y = got.x_RH * got.weights_RK.sum(1, keepdim=True) if group.rank == 0 else torch.zeros(got.x_RH.shape).double()
    collect_sums(y, got, stage="sums").sum().backward()
    assert x.grad is not None and w.grad is not None
    return [bool((x.grad == w.detach()[:, :1]).all()), w.grad[:, 1].tolist()]


def different_needs(groups: Groups, strategy: str) -> list[str]:
    x, w = torch.zeros(2, 3, requires_grad=groups.rank == 1), torch.ones(2, 1, requires_grad=True)
    try:
        spread_tokens(x, torch.zeros(2, 1, dtype=torch.int64), w, groups.ep, 4, strategy=strategy, stage="t")
    except RuntimeError as problem:
        groups.health.failure = None
        return [type(problem).__name__, str(problem)]
    return ["no error", ""]


def sent_rows(groups: Groups) -> list[int]:
    """Rows of x that this rank sent in all_to_all, of 6 rows with 6 routes each over 2 ranks."""
    before, groups.ep.ledger = groups.ep.ledger, Ledger(10)
    chosen = torch.tensor([[0, 1, 2, 3, 4, 5]] * 4 + [[0, 1, 2, 3, 0, 1]] * 2)
    x, w = torch.zeros(6, HIDDEN), torch.ones(6, 6)
    spread_tokens(x, chosen, w, groups.ep, EXPERTS, strategy="all_to_all", stage="tokens")
    rows = [record.rows for record in groups.ep.ledger if record.stage == "tokens.x"]
    groups.ep.ledger = before
    return rows


@pytest.mark.parametrize("ep", [2, 4])
def test_against_the_oracle(ranks: RankPools, ep: int) -> None:
    ranks.run_both(Topology(ep, 1, ep), "test_tokens:order")


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_those_of_one_rank(ranks: RankPools, ep: int, strategy: str) -> None:
    cases = [("ragged", 6, "random"), ("ragged", 1, "random"), ("alike", 3, "holes"), ("one", 2, "one rank")]
    for kind, k, how in [*cases, ("none", 2, "random")]:
        arguments = {"kind": kind, "k": k, "how": how, "strategy": strategy, "most_rows": kind == "alike"}
        got = ranks.run_both(Topology(ep, 1, ep), "test_tokens:gradients", **arguments)
        rows = ROWS[kind][:ep]
        xs, ws = inputs(rows, k, torch.float64)
        generator = torch.Generator().manual_seed(3)
        matrices = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
        leaves = [t.clone().requires_grad_() for t in (torch.cat(xs), torch.cat(ws), matrices)]
        y = leaves[0]
        for _ in range(2):
            y = y + layer(y, leaves[1], torch.cat(routing(rows, k, how)), leaves[2], Groups.single().ep, strategy)
        y.square().sum().backward()
        for place, wanted in enumerate([y, *(leaf.grad for leaf in leaves)]):
            whole = torch.cat([from_bytes(result[place]) for result in got])
            assert wanted is not None
            assert torch.allclose(whole, wanted, atol=1e-12, rtol=1e-12), (kind, k, how, place)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_without_a_graph_keep_nobody_waiting(ranks: RankPools, strategy: str) -> None:
    for x_is_right, unused in ranks.run(Topology(2, 1, 2), "test_tokens:loose", strategy=strategy):
        assert x_is_right and unused == [0.0] * 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_different_needs_are_an_error_on_all(ranks: RankPools, strategy: str) -> None:
    for name, text in ranks.run(Topology(2, 1, 2), "test_tokens:different_needs", strategy=strategy):
        assert name == "CollectiveMismatch" and "[2, 3] by rank" in text


def test_a_row_goes_once_to_a_rank(ranks: RankPools) -> None:
    assert ranks.run(Topology(2, 1, 2), "test_tokens:sent_rows") == [[6 + 4]] * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy": "ring"}, r"'ring', allowed: \['all_gather', 'all_to_all'\]"),
        ({"indices_TK": torch.full((2, 1), 4)}, "indices reach 4, allowed: below the 4 experts"),
        ({"indices_TK": torch.zeros(2, 1, dtype=torch.int32)}, "int32"),
        ({"indices_TK": torch.zeros(3, 1, dtype=torch.int64)}, r"allowed: \[T, H\]"),
        ({"weights_TK": torch.ones(2, 2)}, r"weights are \[2, 2\]"),
        ({"x_TH": torch.zeros(2, 3, dtype=torch.int64)}, "x is torch.int64"),
        ({"most_rows": 1}, "most_rows is 1, allowed: from 2"),
    ],
)
def test_refusals(changes: dict, words: str) -> None:
    arguments = {
        "x_TH": torch.zeros(2, 3),
        "indices_TK": torch.zeros(2, 1, dtype=torch.int64),
        "weights_TK": torch.ones(2, 1),
        "group": Groups.single().ep,
        "num_experts": 4,
        "strategy": "all_gather",
    }
    with pytest.raises(ValueError, match=words):
        spread_tokens(**{**arguments, **changes}, stage="s")


def test_sums_of_other_rows_are_refused() -> None:
    got = spread_tokens(
        torch.zeros(2, 3),
        torch.zeros(2, 1, dtype=torch.int64),
        torch.ones(2, 1),
        Groups.single().ep,
        4,
        strategy="all_gather",
        stage="s",
    )
    with pytest.raises(ValueError, match=r"\[3\] rows, allowed: \[2\]"):
        collect_sums(torch.zeros(3, 3), got, stage="s")
