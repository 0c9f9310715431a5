"""The plain MTP layer as a drafter: against a naive one around window and wrap, its faults, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from draft_scene import draft_config, draft_weights
from mtp_scene import Anchor, Row, Scene, mtp_config, mtp_layer, run_text, streams_of, text_of

from meshspark.layouts.bits import same_bits
from meshspark.models import selfcheck
from meshspark.models.dspark import mtp
from meshspark.models.dspark.mtp import MtpLayer, draft_odds, make_mtp, mtp_shape
from meshspark.models.dspark.proposer import KeptRows, Room
from meshspark.models.dspark.shape import DraftShape
from meshspark.models.numerics import BFLOAT16, FLOAT64
from meshspark.models.v4.config import flash, tiny, tiny_mtp
from meshspark.models.v4.model import Tap
from meshspark.models.v4.pools import DRAFT_FAMILY
from meshspark.parallel.groups import Groups

SHORT = (1, 1, 12, 1, 1, 1, 2, 4, 1, 7, 13, 18, 3, 1, 1, 1, 1)
"""Around a window of 16 and pages of 4; ends where the oldest page that is held begins before the window."""


def test_naive_layer_agrees_around_window_and_wrap() -> None:
    run_text(SHORT)


def test_naive_layer_agrees_in_single_rows() -> None:
    """Every position once: page ends, the window, and the wrap of the table."""
    run_text((1,) * 70)


def test_naive_layer_agrees_at_the_flash_window() -> None:
    run_text((126, 1, 1, 1, 1, 31, 95, 2), window=128, page=32)


def _tokens_of_the_row_before(patch: pytest.MonkeyPatch) -> None:
    real = mtp.join_next
    patch.setattr(mtp, "join_next", lambda streams, after, layer: real(streams, after.roll(1), layer))


def _tokens_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The token of the row itself, where the next one should be."""
    text = text_of(3)
    before = {token: text[position - 1] for position, token in enumerate(text) if position}
    real = mtp.join_next

    def join(streams: torch.Tensor, after: torch.Tensor, layer: MtpLayer) -> torch.Tensor:
        return real(streams, torch.tensor([before.get(token, 0) for token in after.tolist()]), layer)

    patch.setattr(mtp, "join_next", join)


def _norm_over_all_streams(patch: pytest.MonkeyPatch) -> None:
    real, hnorm, h = mtp.rms_norm, draft_weights(mtp_config(), "float64")["mtp.0.hnorm.weight"], tiny_mtp().hc_mult

    def norm(x: torch.Tensor, gain: torch.Tensor, eps: float, out: torch.dtype) -> torch.Tensor:
        if not torch.equal(gain, hnorm):
            return real(x, gain, eps, out)
        return real(x.view(-1, h * x.shape[1]), gain.repeat(h), eps, out).view(x.shape)

    patch.setattr(mtp, "rms_norm", norm)


def _projections_swapped(patch: pytest.MonkeyPatch) -> None:
    real = mtp.join_next

    def join(streams: torch.Tensor, after: torch.Tensor, layer: MtpLayer) -> torch.Tensor:
        weights = replace(layer.weights, e_proj=layer.weights.h_proj, h_proj=layer.weights.e_proj)
        return real(streams, after, replace(layer, weights=weights))

    patch.setattr(mtp, "join_next", join)


def _window_of(change: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        real = mtp.plan_draft

        def plan(blocks: Any, layer: MtpLayer, *args: Any, **kwargs: Any) -> Any:
            config = replace(layer.config, sliding_window=layer.config.sliding_window + change)
            return real(blocks, replace(layer, config=config), *args, **kwargs)

        patch.setattr(mtp, "plan_draft", plan)

    return plant


def _keys_turned_one_further(patch: pytest.MonkeyPatch) -> None:
    real = mtp.mtp_keys
    patch.setattr(mtp, "mtp_keys", lambda joined, position, layer: real(joined, position + 1, layer))


def _rows_turned_one_further(patch: pytest.MonkeyPatch) -> None:
    real = mtp.read_blocks

    def read(streams: torch.Tensor, slab: Any, *args: Any) -> torch.Tensor:
        return real(streams, replace(slab, position_T=slab.position_T + 1), *args)

    patch.setattr(mtp, "read_blocks", read)


def _all_turned_one_further(patch: pytest.MonkeyPatch) -> None:
    """Attention alone would not tell: it sees distances."""
    _keys_turned_one_further(patch)
    _rows_turned_one_further(patch)


def _own_row_twice(patch: pytest.MonkeyPatch) -> None:
    """Context up to the anchor, where the row before it is the block's own."""
    real = mtp.plan_draft

    def plan(blocks: Any, layer: MtpLayer, *args: Any, **kwargs: Any) -> Any:
        made = real(blocks, replace(layer, shape=replace(layer.shape, lead=0)), *args, **kwargs)
        slabs = [replace(slab, position_T=slab.position_T - 1) for slab in made.slabs]
        return replace(made, slabs=tuple(slabs))

    patch.setattr(mtp, "plan_draft", plan)


PLANTS = {
    "tokens of the row before": _tokens_of_the_row_before,
    "tokens off by one": _tokens_off_by_one,
    "norm over all streams": _norm_over_all_streams,
    "projections swapped": _projections_swapped,
    "window one too long": _window_of(1),
    "window one too short": _window_of(-1),
    "keys turned one further": _keys_turned_one_further,
    "rows turned one further": _rows_turned_one_further,
    "all turned one further": _all_turned_one_further,
    "own row twice": _own_row_twice,
}


@pytest.mark.parametrize("plant", PLANTS)
def test_faults_are_seen(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[plant](monkeypatch)
    with pytest.raises(AssertionError):
        run_text(SHORT)


@pytest.mark.parametrize(("mode", "limit"), [("float32", 1e-4), ("bfloat16", 0.1), ("w8a8", 0.1)])
def test_narrow_modes_stay_near_the_wide_one(mode: str, limit: float) -> None:
    wide, narrow = (run_text((9, 13), mode=each)[1].logits for each in ("float64", mode))
    assert wide is not None and narrow is not None
    assert (wide - narrow.double()).abs().max() < limit * wide.abs().max()


def test_rejected_rows_and_stale_generations_leave_no_trace() -> None:
    scene, _ = run_text((20,))
    pool = scene.caches.pools[DRAFT_FAMILY]
    before, ends = pool.clone(), scene.caches.context_Q.copy()
    streams, two = scene.taps(torch.ones(2, 4, 64, dtype=torch.float64)), np.array([20, 21])
    scene.caches.extend(5, 20, 2)
    slot, stamp = np.full(2, 5), np.full(2, scene.caches.generation(5))
    for rows in (KeptRows(slot, stamp, two * 0 - 1, two), KeptRows(slot, stamp - 1, two, two)):
        scene.proposer.keep(rows, streams, scene.caches)
        assert same_bits(pool, before) and (scene.caches.context_Q == ends).all()
    scene.proposer.keep(KeptRows(slot, stamp, np.array([20, -1]), np.array([7, -1])), streams, scene.caches)
    assert scene.caches.context_Q[5] == 21
    changed = (pool != before) & ~(pool.isnan() & before.isnan())
    assert changed.any(2).sum() == 1


def test_what_only_its_owner_knows_is_asked_of_nobody_else() -> None:
    scene, _ = run_text((20,))
    assert scene.proposer.pins_prompt_end and scene.proposer.gamma == scene.proposer.stages == 1
    assert scene.proposer.taps == (Tap(4, "streams"),)
    streams = torch.ones(1, 4, 64, dtype=torch.float64)
    scene.caches.extend(5, 20, 1)
    before = scene.caches.pools[DRAFT_FAMILY].clone()
    one = KeptRows(np.array([5]), np.array([scene.caches.generation(5)]), np.array([20]), np.array([-1]))
    scene.proposer.keep(one, scene.taps(streams), scene.caches)
    assert same_bits(scene.caches.pools[DRAFT_FAMILY], before)
    with pytest.raises(RuntimeError, match="request slot 5 has context rows of 20 positions, 21 are committed"):
        scene.caches.commit(5, [], 21)
    with pytest.raises(RuntimeError, match="before position 20 of request slot 5 is not in its owner's band"):
        scene.propose([Anchor(3, 5, 20)], streams, [-1])


def test_nothing_to_draft_is_nothing_drafted() -> None:
    scene = Scene(mtp_layer(Groups.single(), "float32"), seed=1)
    streams = scene.keep([[]])
    for most in (0, 1, 17):
        got = scene.propose([], streams, [], Room((0,), most))
        assert got.logits is not None
        assert got.ids.shape == got.confidence.shape == (0, 1) and got.logits.shape == (0, 1, 264)


def test_a_row_that_is_not_finite_drafts_nothing() -> None:
    scene, want = run_text((20,))
    scene.keep([[Row(4, 2, position) for position in range(9)]])
    rows = torch.stack([streams_of(scene.layer.config, 3, 19), torch.full((4, 64), float("inf"))]).double()
    got = scene.propose([Anchor(4, 2, 9), Anchor(3, 5, 20)], rows, [1, 0])
    assert got.ids[0].tolist() == [-1] and got.confidence.isfinite().all()
    assert same_bits(got.ids[1], want.ids[0]) and got.confidence[0] < got.confidence[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_odds_are_those_of_the_draft_by_its_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = torch.tensor([0, 8, 3, 3])
    p = torch.tensor([float(row[i].exp() / row.exp().sum()) for row, i in zip(logits, ids, strict=True)])
    got = draft_odds(logits.to(dtype), ids)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double().sigmoid(), p.double(), rtol=0, atol=1e-6)
    sure = torch.tensor([[900.0, 0.0], [0.0, 900.0], [float("nan"), 0.0]], dtype=dtype)
    certain, hopeless, none = draft_odds(sure, torch.tensor([0, 0, -1])).tolist()
    assert 15 < certain < 40 and -800 < hopeless == none < -80


def test_what_does_not_fit_is_refused() -> None:
    config = mtp_config()
    assert mtp_shape(config) == mtp_shape(config, 1) == DraftShape(1, 1, 16, lead=1)
    assert mtp_shape(config).padded_rows == 1
    for gamma in (0, 2, 5):
        with pytest.raises(ValueError, match=f"gamma is {gamma}, allowed: 1"):
            mtp_shape(config, gamma)
    with pytest.raises(ValueError, match="slab_blocks is 0, allowed: 1 or more"):
        mtp_shape(config, slab_blocks=0)
    for other, found in ((draft_config(), "dspark"), (tiny(), "none")):
        with pytest.raises(ValueError, match=f"drafter is '{found}', allowed: 'mtp'"):
            mtp_shape(other)
    with pytest.raises(ValueError, match=r"\(0, 0\), allowed: one of 0"):
        mtp_shape(replace(config, draft_ratios=(0, 0)))
    weights = dict(draft_weights(config, "float64"))
    ends = weights["embed.weight"], weights["head.weight"]
    with pytest.raises(ValueError, match=r"lack 1 tensors of the drafter, the first is mtp\.0\.h_proj"):
        lacking = {n: w for n, w in weights.items() if "h_proj" not in n}
        make_mtp(config, lacking, *ends, Groups.single(), FLOAT64)
    with pytest.raises(ValueError, match="kv_group is 7"):
        make_mtp(config, weights, *ends, Groups.single(), FLOAT64, kv_group=7)


def test_the_self_check_tries_the_layer() -> None:
    def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    without = selfcheck._linears(replace(flash(), draft_ratios=()), BFLOAT16)
    assert selfcheck._linears(flash(), BFLOAT16) - without == {(torch.bfloat16, 4096, 4096)}
    assert not list(selfcheck._block_products(tiny(), noise))
    names = [name for name, _ in selfcheck._block_products(mtp_config(), noise)]
    assert names == ["block scores 16 lanes", "block values 16 lanes"]
