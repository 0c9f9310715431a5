"""The drafter at work: against a naive one around window and wrap, in company, with gradients."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from draft_scene import (
    MAX_FRESH,
    PAGE,
    SLOTS,
    Pages,
    anchor_of,
    draft_config,
    draft_model,
    draft_weights,
    drafts_of,
    feed,
    taps_of,
)
from naive_dspark import naive_context, naive_draft, through_fp8

from meshspark.layouts.bits import same_bits
from meshspark.models.dspark.context import draft_payload, name_rows, write_context
from meshspark.models.dspark.draft import Drafts, draft
from meshspark.models.dspark.drafter import Drafter, make_drafter
from meshspark.models.dspark.heads import base_logits, confidence_logits, markov_bias
from meshspark.models.dspark.plan import DraftBlock, plan_draft
from meshspark.models.dspark.projector import context_keys, draft_taps, join_taps, project
from meshspark.models.dspark.round_trip import round_trip
from meshspark.models.dspark.shape import DraftShape, draft_shape
from meshspark.models.dspark.stage import block_readout
from meshspark.models.dspark.weights import count_stages
from meshspark.models.functions import sigmoid
from meshspark.models.kernels.calls import Kernels
from meshspark.models.kernels.choice import choose_kernels
from meshspark.models.numerics import BFLOAT16, FLOAT64, numerics
from meshspark.models.selfcheck import row_independence
from meshspark.models.v4.config import tiny
from meshspark.models.v4.pools import draft_family
from meshspark.parallel.groups import Groups


def check_naive(drafter: Drafter, got: Drafts, number: int, request: int, position: int) -> None:
    """One block's drafts are those of the naive drafter."""
    config, weights = drafter.config, dict(draft_weights(drafter.config, "float64"))
    context = naive_context(config, weights, taps_of(request, range(position), drafter), drafter.kv_group)
    gamma, rows = drafter.shape.gamma, drafter.shape.rows
    want = naive_draft(config, weights, context, anchor_of(request, position), gamma, rows, drafter.kv_group)
    assert got.logits is not None
    torch.testing.assert_close(got.logits[number], want.corrected, rtol=0, atol=1e-10)
    torch.testing.assert_close(got.confidence[number], want.confidence, rtol=0, atol=1e-10)
    assert got.ids[number].tolist() == want.drafts


@pytest.mark.parametrize("position", [1, 2, 15, 16, 17, 23, 24, 25, 31, 32, 33, 44, 45, 63, 64, 65, 70])
def test_naive_drafter_agrees_around_window_and_wrap(position: int) -> None:
    """Window 16, pages of 4, a ring of 11 pages: p + 1 below, at and above the window, before and behind the wrap."""
    drafter = draft_model(Groups.single(), "float64")
    pages = Pages(drafter, SLOTS, MAX_FRESH, PAGE, seed=position)
    assert pages.depth == 11
    feed(drafter, pages, 3, 5, 0, position)
    check_naive(drafter, drafts_of(drafter, pages, [(3, 5, position)]), 0, 3, position)


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_naive_drafter_agrees_for_other_gammas(gamma: int) -> None:
    """Fewer drafts come from the whole block; more widen it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drafter = draft_model(Groups.single(), "float64", shape=draft_shape(draft_config(), gamma))
    pages = Pages(drafter, SLOTS, MAX_FRESH, PAGE, seed=1)
    feed(drafter, pages, 2, 0, 0, 21)
    got = drafts_of(drafter, pages, [(2, 0, 21)])
    assert got.ids.shape == (1, gamma)
    check_naive(drafter, got, 0, 2, 21)


def test_naive_drafter_agrees_with_the_round_trip() -> None:
    drafter = draft_model(Groups.single(), "float64", kv_group=8)
    pages = Pages(drafter, SLOTS, MAX_FRESH, PAGE, seed=1)
    feed(drafter, pages, 2, 0, 0, 21)
    check_naive(drafter, drafts_of(drafter, pages, [(2, 0, 21)]), 0, 2, 21)


def test_three_stages_and_the_flash_window() -> None:
    drafter = draft_model(Groups.single(), "float64", draft_config(3, 128))
    pages = Pages(drafter, 2, 64, 32, seed=1)
    for slot, position in enumerate((127, 300)):
        feed(drafter, pages, slot, slot, 0, position, 64)
    got = drafts_of(drafter, pages, [(1, 1, 300), (0, 0, 127)])
    check_naive(drafter, got, 0, 1, 300)
    check_naive(drafter, got, 1, 0, 127)


def test_rejected_rows_and_stale_generations_leave_no_trace() -> None:
    drafter = draft_model(Groups.single(), "float64")
    pages = Pages(drafter, SLOTS, MAX_FRESH, PAGE, seed=1)
    feed(drafter, pages, 1, 2, 0, 20)
    pages.extend(2, 26)
    before = pages.pool.keys_MSD.clone()
    position = np.arange(20, 26)
    keys = context_keys(project(taps_of(9, range(20, 26), drafter), drafter), torch.from_numpy(position), drafter)
    slot, stamp = np.full(6, 2), np.full(6, pages.generation(2))
    write_context(keys, name_rows(slot, stamp, position, np.zeros(6, bool)), pages.pool, drafter)
    write_context(keys, name_rows(slot, stamp - 1, position), pages.pool, drafter)
    assert same_bits(pages.pool.keys_MSD, before)
    assert pages.pool.context_Q.tolist() == [0, 0, 20, 0, 0, 0, 0, 0]
    write_context(keys, name_rows(slot, stamp, position, np.arange(6) < 2), pages.pool, drafter)
    assert pages.pool.context_Q.tolist() == [0, 0, 22, 0, 0, 0, 0, 0]
    assert same_bits(pages.rows(2, range(20, 22)), keys[:, :2])
    changed = (pages.pool.keys_MSD != before) & ~before.isnan()
    assert changed.any(2).any(0).sum() == 2
    with pytest.raises(RuntimeError, match="position 40 of request slot 2 has no page"):
        write_context(keys[:, :1], name_rows(slot[:1], stamp[:1], position[:1] + 20), pages.pool, drafter)
    with pytest.raises(RuntimeError, match="two rows"):
        write_context(keys[:, :2], name_rows(slot[:2], stamp[:2], position[:1].repeat(2)), pages.pool, drafter)


def test_unread_rows_may_hold_nan() -> None:
    drafter = draft_model(Groups.single(), "float64")
    results = []
    for fill in (0.0, float("nan")):
        pages = Pages(drafter, SLOTS, MAX_FRESH, PAGE, seed=1)
        pages.pool.keys_MSD.fill_(fill)
        feed(drafter, pages, 1, 2, 0, 9)
        results.append(drafts_of(drafter, pages, [(1, 2, 9)]))
    assert same_bits(results[0].logits, results[1].logits)


def test_fresh_context_gives_what_the_pool_gives() -> None:
    """Training has no pool: context rows are those of the call. A mixture of both works too."""
    drafter = draft_model(Groups.single(), "float64")
    pages = Pages(drafter, SLOTS, MAX_FRESH, PAGE, seed=1)
    feed(drafter, pages, 1, 2, 0, 21)
    want = drafts_of(drafter, pages, [(1, 2, 21)])
    keys = context_keys(project(taps_of(1, range(21), drafter), drafter), torch.arange(21), drafter)
    keys = torch.cat((torch.full_like(keys[:, :3], float("nan")), keys), dim=1)
    for first in (0, 10):
        block = DraftBlock(2, 21, anchor_of(1, 21), first_fresh=first, fresh_row=3 + first)
        got = draft(
            plan_draft([block], drafter, pages.pool.table if first else None),
            drafter,
            pages.pool.keys_MSD if first else None,
            keys,
            keep_logits=True,
        )
        assert same_bits(got.logits, want.logits)


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "w8a8"])
def test_company_changes_no_bit(mode: str) -> None:
    """Alone, beside others, in another slab, and fed in other chunks: the same bits."""
    if not row_independence(draft_config(), (numerics(mode),))["holds"]:
        pytest.skip("this machine's products depend on the row count")
    drafter = draft_model(Groups.single(), mode, shape=DraftShape(5, 5, 4))
    at = [(request, (3 * request) % SLOTS, 7 * request + 2) for request in range(7)]
    alone = []
    for request, slot, position in at:
        pages = Pages(drafter, SLOTS, MAX_FRESH, PAGE, seed=request)
        feed(drafter, pages, request, slot, 0, position, 1 + request)
        alone.append(drafts_of(drafter, pages, [(request, slot, position)]))
    pages = Pages(drafter, SLOTS, MAX_FRESH, PAGE, seed=50)
    for request, slot, position in at:
        feed(drafter, pages, request, slot, 0, position)
    together = drafts_of(drafter, pages, at)
    assert together.logits is not None
    for number, one in enumerate(alone):
        assert one.logits is not None
        assert same_bits(one.logits[0], together.logits[number])
        assert same_bits(one.confidence[0], together.confidence[number])
        assert torch.equal(one.ids[0], together.ids[number])


@pytest.mark.parametrize(("mode", "limit"), [("float32", 1e-4), ("bfloat16", 0.1), ("w8a8", 0.1)])
def test_narrow_modes_stay_near_the_wide_one(mode: str, limit: float) -> None:
    wide = draft_model(Groups.single(), "float64")
    narrow = draft_model(Groups.single(), mode)
    results = []
    for drafter in (wide, narrow):
        pages = Pages(drafter, SLOTS, MAX_FRESH, PAGE, seed=1)
        feed(drafter, pages, 1, 2, 0, 21)
        block = DraftBlock(2, 21, anchor_of(1, 21))
        with torch.no_grad():
            slab = plan_draft([block], drafter, pages.pool.table).slabs[0]
            base = base_logits(block_readout(slab, drafter, pages.pool.keys_MSD), slab, drafter)
        assert base.dtype == drafter.numerics.accumulation
        assert pages.pool.keys_MSD.dtype == drafter.numerics.kv
        results.append(base.double())
    assert (results[0] - results[1]).abs().max() < limit * results[0].abs().max()


def test_drafts_do_not_touch_the_block_and_noise_rows_see_each_other() -> None:
    drafter = draft_model(Groups.single(), "float64")
    pages = Pages(drafter, SLOTS, MAX_FRESH, PAGE, seed=1)
    feed(drafter, pages, 1, 2, 0, 12)
    plan = plan_draft([DraftBlock(2, 12, 7)], drafter, pages.pool.table)
    slab = plan.slabs[0]
    readout = block_readout(slab, drafter, pages.pool.keys_MSD)
    tokens = slab.token_T.clone()
    tokens[4] = 9
    moved = block_readout(replace(slab, token_T=tokens), drafter, pages.pool.keys_MSD)
    assert ((moved - readout).abs().amax(2) > 1e-8).all()
    chosen: list[torch.Tensor] = []

    def choose(logits: torch.Tensor, number: int, blocks: range) -> torch.Tensor:
        assert list(blocks) == [0]
        chosen.append(logits)
        return torch.tensor([11 + number])

    got = draft(plan, drafter, pages.pool.keys_MSD, choose=choose, keep_logits=True)
    base = base_logits(readout, slab, drafter)
    heads = drafter.weights.heads
    previous = torch.tensor([7, 11, 12, 13, 14])
    assert got.ids.tolist() == [[11, 12, 13, 14, 15]] and got.logits is not None
    assert same_bits(got.logits[0], base[0] + markov_bias(previous, heads, torch.float64))
    assert same_bits(torch.cat(chosen), got.logits[0])
    assert same_bits(got.confidence[0], confidence_logits(readout[0], previous, heads, torch.float64))


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "w8a8"])
@pytest.mark.parametrize("requests", [1, 3, 7])
def test_compiled_kernels_change_no_bit_of_a_draft(mode: str, requests: int) -> None:
    """Context rows and drafts of requests below, at and above the window; widths that kernels take."""
    config = replace(draft_config(), hidden_size=64, moe_intermediate_size=32)
    plain = draft_model(Groups.single(), mode, config)
    found = choose_kernels(config, plain.numerics, plain.groups)
    if found is None:
        pytest.skip("no compiled kernels, or no fused multiply-add, here")
    used: list[str] = []
    watched = replace(plain, kernels=Watched(found, used))
    results = []
    for drafter in (plain, watched):
        pages = Pages(drafter, SLOTS, MAX_FRESH, PAGE, seed=1)
        with torch.inference_mode():
            for slot in range(requests):
                feed(drafter, pages, slot, slot, 0, 9 + 4 * slot)
            got = drafts_of(drafter, pages, [(slot, slot, 9 + 4 * slot) for slot in range(requests)])
        results.append((pages.pool.keys_MSD, got.ids, got.confidence))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert {"collapse", "spread"} <= set(used)
    if mode == "float32":
        assert {"norm_turn", "product"} <= set(used)


class Watched:
    """Kernels that note which of them were used."""

    def __init__(self, kernels: Kernels, used: list[str]) -> None:
        self._kernels, self._used = kernels, used

    def __getattr__(self, name: str) -> object:
        self._used.append(name)
        return getattr(self._kernels, name)


def test_rows_that_are_not_finite_draft_nothing() -> None:
    drafter = draft_model(Groups.single(), "float64")
    pages = Pages(drafter, SLOTS, MAX_FRESH, PAGE, seed=1)
    for slot in (1, 2):
        feed(drafter, pages, slot, slot, 0, 12)
    want = drafts_of(drafter, pages, [(2, 2, 12)])
    pages.pool.keys_MSD[:, pages.pool.table.slots(torch.tensor(1), torch.tensor([11]))] = float("inf")
    got = drafts_of(drafter, pages, [(1, 1, 12), (2, 2, 12)])
    assert got.ids[0].tolist() == [-1] * 5
    assert same_bits(got.ids[1], want.ids[0])


def loss_of(drafter: Drafter, taps: torch.Tensor) -> torch.Tensor:
    """A loss over all outputs of two blocks behind one sequence, with given tokens before each draft."""
    keys = context_keys(project(taps, drafter), torch.arange(len(taps)), drafter)
    blocks = [DraftBlock(0, position, 5 + position, first_fresh=0) for position in (4, 19)]
    slab = plan_draft(blocks, drafter).slabs[0]
    readout = block_readout(slab, drafter, None, keys)
    wide, heads, previous = drafter.numerics.accumulation, drafter.weights.heads, torch.arange(2, 12)
    logits = base_logits(readout, slab, drafter).flatten(0, 1) + markov_bias(previous, heads, wide)
    confidence = sigmoid(confidence_logits(readout.flatten(0, 1), previous, heads, wide))
    return F.cross_entropy(logits, previous + 20) + (confidence * torch.arange(1, 11)).sum()


@pytest.mark.parametrize("kv_group", [0, 8])
def test_gradient_is_the_slope_of_the_loss(kv_group: int) -> None:
    """Every tensor of the drafter moved at once along a random direction, FP64 central difference."""
    config = draft_config()
    weights = {n: w.clone().requires_grad_(n.startswith("mtp.")) for n, w in draft_weights(config, "float64").items()}

    def model(values: dict[str, torch.Tensor]) -> Drafter:
        own = {n: w for n, w in values.items() if n.startswith("mtp.")}
        ends = values["embed.weight"], values["head.weight"]
        return make_drafter(config, own, *ends, Groups.single(), FLOAT64, kv_group=kv_group)

    taps = taps_of(1, range(19), model(weights)).requires_grad_()
    loss_of(model(weights), taps).backward()
    assert taps.grad is not None and taps.grad.abs().amax(1).gt(0).all()
    assert weights["embed.weight"].grad is None
    without = {n for n, w in weights.items() if w.requires_grad and w.grad is None}
    assert without == {f"mtp.{stage}.ffn.gate.bias" for stage in range(2)}
    if kv_group:
        # Straight through: the loss itself is a staircase, so only that the gradient comes is asked.
        return
    generator = torch.Generator().manual_seed(1)
    moved = {n: torch.randn(w.shape, generator=generator, dtype=w.dtype) for n, w in weights.items()}
    slope = sum(float((w.grad * moved[n]).sum()) for n, w in weights.items() if w.grad is not None)
    step, values = 1e-8, []
    with torch.no_grad():
        for sign in (1, -1):
            shifted = {n: w + sign * step * moved[n] if w.grad is not None else w for n, w in weights.items()}
            values.append(float(loss_of(model(shifted), taps)))
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5)


def test_round_trip_is_the_nearest_code() -> None:
    kv = torch.randn(6, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    kv[1] *= 1e-6
    kv[2] = 0
    kv[3, :8] = torch.tensor([448.0, -447.9, 1.0625, 1.1875, 2.0**-9, 3e-4, 0.0, -17.0])
    got = round_trip(kv, 8, 8)
    assert torch.equal(got, through_fp8(kv, 16, 8))
    assert torch.equal(got[:, 16:], kv[:, 16:]) and not torch.equal(got, kv)
    assert round_trip(kv, 8, 0) is kv
    assert round_trip(kv[:0], 8, 8).shape == (0, 24)


def test_key_rows_travel_and_nothing_wider() -> None:
    config = draft_config(3)
    payload = draft_payload(replace(config, head_dim=512, qk_rope_head_dim=64, index_head_dim=128), BFLOAT16)
    assert payload.width == 3 * 512 + 3 * 4


def test_gamma_beyond_the_block_warns_and_below_one_is_refused() -> None:
    config = draft_config()
    assert draft_shape(config) == DraftShape(5, 5, 16)
    assert draft_shape(config, 2) == DraftShape(2, 5, 16)
    with pytest.warns(UserWarning, match="gamma is 7, but the drafter was trained on blocks of 5"):
        assert draft_shape(config, 7) == DraftShape(7, 7, 16)
    with pytest.raises(ValueError, match="gamma is 0"):
        draft_shape(config, 0)
    with pytest.raises(ValueError, match="no dspark_"):
        draft_shape(tiny())


def test_weights_that_do_not_fit_are_refused() -> None:
    config = draft_config()
    whole = dict(draft_weights(config, "float64"))
    ends = whole["embed.weight"], whole["head.weight"]

    def make(weights: dict[str, torch.Tensor], **kwargs: Any) -> Drafter:
        return make_drafter(config, weights, *ends, Groups.single(), FLOAT64, **kwargs)

    assert make(whole).stages == 2
    with pytest.raises(ValueError, match=r"lack 1 tensors.*mtp\.1\.markov_head\.markov_w1"):
        make({n: w for n, w in whole.items() if "markov_w1" not in n})
    with pytest.raises(ValueError, match="1 stages"):
        make({n: w for n, w in whole.items() if not n.startswith("mtp.1.")})
    with pytest.raises(ValueError, match="kv_group is 7"):
        make(whole, kv_group=7)
    with pytest.raises(ValueError, match=r"stages \[0, 2\]"):
        count_stages(["mtp.0.norm.weight", "mtp.2.norm.weight", "norm.weight"])


def test_plans_that_do_not_fit_are_refused() -> None:
    drafter = draft_model(Groups.single(), "float64", shape=DraftShape(5, 5, 2))
    pages = Pages(drafter, SLOTS, MAX_FRESH, PAGE, seed=1)
    blocks = [DraftBlock(0, 4, 3)] * 3
    with pytest.raises(ValueError, match="3 blocks"):
        plan_draft(blocks, drafter, pages.pool.table, slabs=1)
    with pytest.raises(ValueError, match="bounds"):
        plan_draft(blocks[:1], drafter, pages.pool.table, slabs=1, bounds=(0,))
    with pytest.raises(ValueError, match="position is 0"):
        plan_draft([DraftBlock(0, 0, 3)], drafter, pages.pool.table)
    with pytest.raises(ValueError, match="no page is mapped"):
        plan_draft([DraftBlock(0, 4, 3)], drafter, pages.pool.table)


def test_nothing_to_draft_is_nothing_drafted() -> None:
    drafter = draft_model(Groups.single(), "float32")
    for slabs in (0, 1, 2):
        got = draft(plan_draft([], drafter, slabs=slabs), drafter, keep_logits=True)
        assert got.logits is not None
        assert got.ids.shape == got.confidence.shape == (0, 5) and got.logits.shape == (0, 5, 264)


def test_taps_stand_in_the_order_of_the_config() -> None:
    config = replace(draft_config(), dspark=replace(draft_config().dspark, target_layer_ids=(4, 2, 3)))
    taps = {tap: torch.full((2, 3), float(tap.layer)) for tap in draft_taps(config)}
    assert [tap.point for tap in taps] == ["mean_out"] * 3
    assert join_taps(taps, config)[0].tolist() == [4, 4, 4, 2, 2, 2, 3, 3, 3]


def test_pages_keep_a_whole_window_before_the_anchor() -> None:
    """The target's window may give back one position more: its next row is itself the last of its window."""
    family = draft_family(draft_config(), 4)
    for length in (1, 15, 16, 17, 40):
        assert family.readable(length) == range(max(0, length - 16), length)
