"""Dispatch and combine against the oracle: skew, empty ranks, INT8 with scales, gradients, both ways of sending."""

import pytest
import torch

from meshspark.comm import experts, oracle
from meshspark.layouts.bits import same_bits
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology


def _experts(size):
    """Experts of the whole block: a multiple of its ranks, more than one each."""
    return 9 if size == 3 else 8


def _ragged(size, rows):
    return [[rows, 0, rows + 3, 1][rank % 4] for rank in range(size)]


def routing(size, rows, k, how, seed=0):
    """(indices, valid) of all ranks."""
    num = _experts(size)
    generator = torch.Generator().manual_seed(seed)
    all_indices, all_valid = [], []
    for count in rows:
        chosen = torch.stack([torch.randperm(num, generator=generator)[:k] for _ in range(count)]) if count else None
        indices = torch.zeros((0, k), dtype=torch.int64) if chosen is None else chosen
        valid = None
        if how == "same":
            indices = torch.arange(k).repeat(count, 1)
        elif how == "last rank":
            indices = torch.full((count, k), num - 1)
        elif how == "not rank 0":
            indices = indices.clamp(min=num // size) if size > 1 else indices
        elif how == "nowhere":
            indices = torch.full((count, k), -1)
        elif how == "holes":
            indices = torch.where(torch.rand(indices.shape, generator=generator) < 0.4, -1, indices)
            valid = torch.rand((count,), generator=generator) < 0.6
        all_indices.append(indices)
        all_valid.append(valid)
    return all_indices, all_valid


def _inputs(rows, k, dtype, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randint(-128, 128, (n, columns), generator=generator).to(dtype) for n in rows]
    weights = [torch.rand(n, k, generator=generator) for n in rows]
    scales = [torch.rand(n, generator=generator) if dtype == torch.int8 else None for n in rows]
    return xs, weights, scales


def check(groups, rows, k, how, dtype, columns=6):
    """One dispatch and one combine of this rank, compared with the oracle in every bit and in order."""
    group = groups.ep
    dtype, num = getattr(torch, dtype), _experts(group.size)
    indices, valid = routing(group.size, rows, k, how)
    xs, weights, scales = _inputs(rows, k, dtype, columns, 3)
    me = group.rank
    sent = experts.dispatch(
        xs[me].t().contiguous().t(), indices[me], weights[me], valid[me], group, num, scales[me], stage="dispatch"
    )
    routes = oracle.dispatch(indices, valid, num)
    mine = routes[me]
    assert sent.x_RD.shape == (len(mine), columns)
    assert sent.routes_R.tolist() == [r.row * k + r.slot for r in mine]
    share = num // group.size
    assert list(sent.expert_counts) == [sum(r.expert == me * share + e for r in mine) for e in range(share)]
    if mine:
        assert same_bits(sent.x_RD, torch.stack([xs[r.source][r.row] for r in mine]))
        assert same_bits(sent.weights_R, torch.stack([weights[r.source][r.row, r.slot] for r in mine]))
        if dtype == torch.int8:
            assert same_bits(sent.scale_R, torch.stack([scales[r.source][r.row] for r in mine]))
    # Each answer tells its expert, source, row and slot.
    results = [
        torch.tensor([[r.expert, r.source, r.row, r.slot] for r in received], dtype=torch.float32).reshape(-1, 4)
        for received in routes
    ]
    got = experts.combine(results[me], sent.handle, stage="combine")
    assert same_bits(got, oracle.combine(results, routes, list(rows), k)[me])
    assert sum(sent.handle.send_counts) == sum(1 for received in routes for r in received if r.source == me)


def sweep(groups, dtype):
    for how in ("random", "same", "last rank", "not rank 0", "nowhere", "holes"):
        for rows in (_ragged(groups.ep.size, 5), [0] * groups.ep.size, [7] * groups.ep.size):
            check(groups, rows, 3, how, dtype)
            check(groups, rows, 1, how, dtype)


def both_ways(groups):
    """Just below and above the size at which the parts go separately; the ranks have different sizes."""
    for dtype, columns in (("int8", 1000), ("bfloat16", 500), ("float64", 125)):
        edge = experts.PACK_LIMIT_BYTES // 1024
        for most in (edge // 4, edge, 4 * edge):
            rows = [most // 2] * (groups.ep.size - 1) + [most]
            check(groups, rows, 2, "random", dtype, columns)


def flood(groups):
    """512 rows a rank, all to the same 6 experts: the multiset is exact."""
    check(groups, [512] * groups.ep.size, 6, "same", "int8", 16)


def gradients(groups, how):
    """Gradients of x, weights and the experts, against the same products on one rank."""
    group = groups.ep
    rows, k, num = _ragged(group.size, 4), 2, _experts(group.size)
    indices, valid = routing(group.size, rows, k, how)
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in rows]
    ws = [torch.rand(n, k, generator=generator, dtype=torch.float64) for n in rows]
    matrices = torch.randn(num, 5, 5, generator=generator, dtype=torch.float64)

    def run(group, x, w, i, v, m):
        sent = experts.dispatch(x, i, w, v, group, num, stage="dispatch")
        pieces = zip(sent.x_RD.split(list(sent.expert_counts)), m, strict=True)
        y = torch.cat([piece @ matrix for piece, matrix in pieces]) * sent.weights_R.unsqueeze(1)
        back = experts.combine(y, sent.handle, stage="combine")
        back.square().sum().backward()
        return x.grad, w.grad, m.grad

    me, share = group.rank, num // group.size
    own = slice(me * share, (me + 1) * share)
    leaves = [t.clone().requires_grad_() for t in (xs[me], ws[me], matrices[own])]
    got = run(group, leaves[0], leaves[1], indices[me], valid[me], leaves[2])
    flags = None if valid[0] is None else torch.cat(valid)
    whole = [t.clone().requires_grad_() for t in (torch.cat(xs), torch.cat(ws), matrices)]
    single = run(Groups.single().ep, whole[0], whole[1], torch.cat(indices), flags, whole[2])
    first = sum(rows[:me])
    wanted = single[0][first : first + rows[me]], single[1][first : first + rows[me]], single[2][own]
    assert all(a is not None and torch.allclose(a, b, atol=1e-12) for a, b in zip(got, wanted, strict=True))


def gradient_on_one_rank_only(groups):
    x = torch.zeros(2, 3, requires_grad=groups.rank == 1)
    try:
        experts.dispatch(x, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), None, groups.ep, 4, stage="d")
    except RuntimeError as problem:
        name = type(problem).__name__
        groups.health.failure = None
        return [name, str(problem)]
    return ["no error", ""]


def foreign_group(groups):
    """A handle of one group is refused by another, naming both topologies."""
    sent = experts.dispatch(
        torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), None, groups.ep, 4, stage="d"
    )
    said = []
    for group in (Groups.single().ep, groups.world):
        try:
            experts.combine(sent.x_RD, sent.handle, group, stage="c")
        except ValueError as problem:
            said.append(str(problem))
    return said


@pytest.mark.parametrize("ep", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float64"])
def test_against_the_oracle(ranks, ep, dtype):
    ranks.run_both(Topology(ep, 1, ep), "test_experts:sweep", timeout=120, dtype=dtype)


@pytest.mark.parametrize("ep", [2, 3, 4])
def test_small_and_large_messages(ranks, ep):
    ranks.run_both(Topology(ep, 1, ep), "test_experts:both_ways", timeout=120)


@pytest.mark.parametrize("ep", [1, 3, 4])
def test_everything_to_the_same_experts(ranks, ep):
    ranks.run(Topology(ep, 1, ep), "test_experts:flood", timeout=120)


@pytest.mark.slow
def test_eight_ranks(ranks):
    ranks.run(Topology(8, 4, 8), "test_experts:sweep", timeout=240, dtype="int8")


def test_two_expert_blocks_side_by_side(ranks):
    ranks.run(Topology(4, 2, 2), "test_experts:sweep", timeout=120, dtype="int8")


@pytest.mark.parametrize("ep", [1, 2, 3, 4])
@pytest.mark.parametrize("how", ["random", "last rank", "nowhere", "holes"])
def test_gradients(ranks, ep, how):
    ranks.run_both(Topology(ep, 1, ep), "test_experts:gradients", how=how)


def test_a_gradient_on_one_rank_only_is_an_error_on_all(ranks):
    for name, text in ranks.run(Topology(2, 1, 2), "test_experts:gradient_on_one_rank_only"):
        assert name == "CollectiveMismatch" and "[0, 1] by rank" in text


def test_a_handle_refuses_another_group(ranks):
    for other, same in ranks.run(Topology(2, 1, 2), "test_experts:foreign_group"):
        assert "Topology(world=2, tp=1, ep=2)" in other and "Topology(world=1, tp=1, ep=1)" in other
        assert "group ep" in same and "group world" in same


def _dispatch(**changes):
    arguments = {
        "x_TD": torch.zeros(2, 3),
        "indices_Tk": torch.zeros(2, 1, dtype=torch.int64),
        "weights_Tk": torch.ones(2, 1),
        "valid_T": None,
        "group": Groups.single().ep,
        "num_experts": 4,
        "scale_T": None,
    }
    return experts.dispatch(**{**arguments, **changes}, stage="s")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"indices_Tk": torch.full((2, 1), 4)}, "indices reach 4, allowed: below the 4 experts"),
        ({"indices_Tk": torch.zeros(2, 1, dtype=torch.int32)}, "int32"),
        ({"indices_Tk": torch.zeros(3, 1, dtype=torch.int64)}, r"allowed: \[T, D\]"),
        ({"weights_Tk": torch.ones(2, 2)}, r"weights are \[2, 2\]"),
        ({"valid_T": torch.ones(2)}, "valid is torch.float32"),
        ({"scale_T": torch.ones(2, 1)}, r"scale is torch.float32 \[2, 1\]"),
        ({"x_TD": torch.zeros(2, 3, dtype=torch.int16)}, "int16"),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(ValueError, match=words):
        _dispatch(**changes)


def test_combine_refuses_a_wrong_number_of_rows():
    with pytest.raises(ValueError, match=r"\[3, 3\], allowed: \[2, columns\]"):
        experts.combine(torch.zeros(3, 3), _dispatch().handle, stage="s")
