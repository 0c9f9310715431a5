"""Slots of positions: 64 bit, ring wrap, -1, and the bounds that keep provisional rows from evicting."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshspark.layouts.lanes import FreshSpan, make_lanes, plan_lanes
from meshspark.layouts.pages import PageFamily, PageTable, page_families
from meshspark.layouts.rowplan import Geometry, plan_rows
from meshspark.layouts.rows import RequestRows, band_length, place_rows


@given(st.integers(0, 2**20), st.sampled_from([1, 2, 8, 32, 64]), st.integers(1, 9), st.integers(0, 5))
def test_slot_is_the_formula_in_python_integers(index: int, page: int, depth: int, seed: int) -> None:
    draw = random.Random(seed)
    pages = [draw.randrange(-1, 2**40) for _ in range(depth)]
    table = PageTable(page, torch.tensor([pages], dtype=torch.int64))
    got = table.slots(torch.tensor(0), torch.tensor([index]))
    physical = pages[index // page % depth]
    assert got.dtype == torch.int64
    assert got.tolist() == [-1 if physical < 0 else physical * page + index % page]


@given(st.integers(0, 1000), st.sampled_from([1, 2, 8, 32]))
def test_the_host_finds_the_same_slots(seed: int, page: int) -> None:
    draw = np.random.default_rng(seed)
    table = PageTable(page, torch.from_numpy(draw.integers(-1, 2**40, (3, 5))))
    request, index = draw.integers(0, 3, 40), draw.integers(0, 2**20, 40)
    got = table.host_slots(request, index)
    assert got.dtype == np.int64
    assert got.tolist() == table.slots(torch.from_numpy(request), torch.from_numpy(index)).tolist()


@given(st.integers(0, 1000))
def test_plans_find_the_lanes_that_layers_find(seed: int) -> None:
    """The host's form beside the device's, fresh and resident lanes mixed."""
    draw = np.random.default_rng(seed)
    tiles, lanes = int(draw.integers(1, 5)), int(draw.integers(1, 40))
    table = {"x": PageTable(8, torch.from_numpy(draw.permutation(60).reshape(3, 20)))}
    index = draw.integers(-5, 150, (tiles, lanes))
    needed = (draw.random((tiles, lanes)) < 0.7) & (index >= 0)
    first = draw.integers(0, 150, tiles)
    span = FreshSpan(*(torch.from_numpy(x) for x in (draw.integers(0, 3, tiles), first, draw.integers(0, 9, tiles))))
    rows = torch.from_numpy(draw.permutation(200))
    got = plan_lanes(index, needed, span, table, ("x",), rows)
    want = make_lanes(torch.from_numpy(index), torch.from_numpy(needed), span, table, ("x",), rows)
    for name in ("fresh_lane", "fresh_source", "resident_lane"):
        assert getattr(got, name).tolist() == getattr(want, name).tolist(), name
    assert {f: s.tolist() for f, s in got.resident.items()} == {f: s.tolist() for f, s in want.resident.items()}
    assert (got.num_tiles, got.num_lanes) == (want.num_tiles, want.num_lanes)


def test_int32_indices_do_not_overflow() -> None:
    table = PageTable(32 * 512, torch.full((1, 1 << 10), 1 << 20, dtype=torch.int64))
    got = table.slots(torch.tensor(0), torch.tensor([1048575], dtype=torch.int32))
    assert got.tolist() == [(1 << 20) * 32 * 512 + 1048575 % (32 * 512)]
    full = PageTable(32, torch.arange(32768)[None])
    assert full.slots(torch.tensor(0), torch.tensor([1048575])).tolist() == [32767 * 32 + 31]


def test_negative_is_nothing() -> None:
    table = PageTable(2, torch.tensor([[3, -1]]))
    assert table.slots(torch.tensor(0), torch.tensor([-1, 0, 1, 2, 3, 4])).tolist() == [-1, 6, 7, -1, -1, 6]


@pytest.mark.parametrize("page", [1, 2, 8, 32])
@pytest.mark.parametrize("history", [8, 128])
@pytest.mark.parametrize("fresh", [1, 9, 512])
def test_a_step_never_evicts_what_it_may_read(page: int, history: int, fresh: int) -> None:
    """Whatever the alignment, all of [start - history, start + fresh) has a slot of its own."""
    depth = PageFamily("x", None, page, history).depth(1 << 20, fresh)
    table = PageTable(page, torch.arange(depth)[None])
    spanned = []
    for start in range(history, history + 3 * page + 3):
        span = range(start - history, start + fresh)
        slots = table.slots(torch.tensor(0), torch.tensor(list(span)))
        assert len(set(slots.tolist())) == history + fresh
        spanned.append(len({p // page for p in span}))
    assert max(spanned) == depth, "the depth is the least that never holds two logical pages of a span in one"


def test_families_follow_the_layers() -> None:
    names = [family.name for family in page_families(128, (0, 4, 128))]
    assert names == ["window_kv", "csa_kv", "csa_index", "csa_state", "index_state", "hca_kv", "hca_state"]
    assert [family.name for family in page_families(128, (0,))] == ["window_kv"]
    depths = {f.name: f.depth(1048576, 8) for f in page_families(128, (0, 4, 128))}
    assert depths["csa_kv"] == depths["csa_index"] == depths["hca_kv"] == 8192
    assert depths["csa_state"] == 9 and depths["hca_state"] == 18


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2), st.booleans()), max_size=6), st.integers(1, 3))
def test_bands_hold_every_row_once_and_pinned_rows_at_home(shape: list[tuple[int, int, bool]], tp: int) -> None:
    requests = [
        RequestRows(slot, 10 * slot, list(range(count)), owner % tp, "verify" if pinned else "prefill")
        for slot, (count, owner, pinned) in enumerate(shape)
    ]
    rows = place_rows(requests, tp)
    total = sum(count for count, _, _ in shape)
    pinned = [sum(len(r.tokens) for r in requests if r.kind == "verify" and r.owner == t) for t in range(tp)]
    assert rows.local_t == band_length(requests, tp) == max([*pinned, -(-total // tp)])
    assert sorted(rows.fresh_rows_N.tolist()) == rows.valid_G.nonzero().flatten().tolist()
    for index, request in enumerate(requests):
        first = int(rows.fresh_offset_R[index])
        own = rows.fresh_rows_N[first : first + len(request.tokens)]
        assert rows.position_G[own].tolist() == list(range(request.start, request.start + len(request.tokens)))
        assert rows.token_G[own].tolist() == list(request.tokens)
        if request.kind == "verify":
            assert set((own // rows.local_t).tolist()) == {request.owner}


def test_a_plan_moves_whole() -> None:
    """No index tensor of a plan stays behind when it goes to a device."""
    geometry = Geometry(16, (0, 4, 128), 8)
    plan = plan_rows([RequestRows(0, 0, list(range(200)), asked=(199,))], geometry)
    meta = torch.device("meta")
    moved = plan.to(meta)
    assert plan.to(torch.device("cpu")) is plan

    def tensors(tree: object) -> list[torch.Tensor]:
        if isinstance(tree, torch.Tensor):
            return [tree]
        if isinstance(tree, dict):
            return [t for part in tree.values() for t in tensors(part)]
        if isinstance(tree, tuple):
            return [t for part in tree for t in tensors(part)]
        return tensors(vars(tree)) if hasattr(tree, "__dict__") and not isinstance(tree, type) else []

    assert len(tensors(moved)) == len(tensors(plan)) > 30
    assert all(tensor.device == meta for tensor in tensors(moved))
