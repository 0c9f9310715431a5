"""Drafting on many ranks is drafting on one: blocks in slabs, context rows gathered, heads and experts sharded."""

import numpy as np
import pytest
import torch
from draft_scene import MAX_FRESH, PAGE, SLOTS, Pages, draft_config, draft_model, drafts_of, taps_of
from rank_pool import RankPools, from_bytes, to_bytes

from meshspark.layouts.bits import same_bits
from meshspark.models.dspark.context import name_rows, write_context
from meshspark.models.dspark.drafter import Drafter
from meshspark.models.dspark.plan import slabs_needed
from meshspark.models.dspark.projector import context_keys, project
from meshspark.models.dspark.shape import DraftShape
from meshspark.models.numerics import numerics
from meshspark.models.selfcheck import row_independence
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

VERIFIED = 6


def group_requests(dp_rank: int) -> list[tuple[int, int]]:
    """(request, length of its prompt) of a dp group, the first of them on tp_rank 0, the second on 1, and so on."""
    return [(10, 21), (11, 3), (12, 34), (13, 15), (14, 40)] if dp_rank == 0 else [(20, 18)]


def slot_of(number: int) -> int:
    return (3 * number + 1) % SLOTS


def band_write(drafter: Drafter, pages: Pages, rows: list[tuple[int, int, int, bool]], local: int) -> None:
    """Bring this rank's rows (request, slot, position, kept) into the pool, padded to `local` rows."""
    rows = rows + [(0, 0, 0, False)] * (local - len(rows))
    taps = [taps_of(request, range(position, position + 1), drafter) for request, _, position, _ in rows]
    _, slot, position, kept = (np.array(column) for column in zip(*rows, strict=True))
    keys = context_keys(project(torch.cat(taps), drafter), torch.from_numpy(position), drafter)
    stamp = np.array([pages.generation(s) for s in slot])
    write_context(keys, name_rows(slot, stamp, position, kept), pages.pool, drafter)


def drive_group(groups: Groups, mode: str, dp_rank: int, bounded: bool, slab_blocks: int) -> dict:
    """One rank's part: prompts in bands, drafts, a verification of which some is accepted, drafts again."""
    drafter = draft_model(groups, mode, shape=DraftShape(5, 5, slab_blocks))
    tp, tp_rank = groups.tp.size, groups.tp.rank
    requests = group_requests(dp_rank)
    pages = Pages(drafter, SLOTS, 64, PAGE, seed=100 + groups.rank)
    for number, (_, length) in enumerate(requests):
        pages.extend(slot_of(number), length)
    rows = [(r, slot_of(n), p, True) for n, (r, length) in enumerate(requests) for p in range(length)]
    local = -(-len(rows) // tp)
    with torch.no_grad():
        band_write(drafter, pages, rows[tp_rank * local : (tp_rank + 1) * local], local)
    result = {"dp_rank": dp_rank, "drafts": [], "dumps": []}
    ends = [length for _, length in requests]
    per_rank = [len(range(rank, len(requests), tp)) for rank in range(tp)]
    slabs = slabs_needed(5, drafter.shape)
    for step in range(2):
        mine = [n for n in range(len(requests)) if n % tp == tp_rank and not (step and n == 3)]
        at = [(requests[n][0], slot_of(n), ends[n]) for n in mine]
        got = drafts_of(drafter, pages, at, slabs=slabs, bounds=per_rank if bounded else None)
        assert got.logits is not None and got.ids.shape == (len(mine), 5)
        for index, n in enumerate(mine):
            parts = [got.ids[index], got.logits[index], got.confidence[index]]
            result["drafts"].append([step, n, *map(to_bytes, parts)])
        if step == 0:
            rows = []
            for n, (request, _) in enumerate(requests):
                pages.extend(slot_of(n), ends[n] + VERIFIED)
                accepted = 1 + (n * 2 + 1) % VERIFIED
                new = [(request, slot_of(n), ends[n] + j, j < accepted) for j in range(VERIFIED)]
                rows += new if n % tp == tp_rank else []
                ends[n] += accepted
            with torch.no_grad():
                band_write(drafter, pages, rows, max(per_rank) * VERIFIED)
    window = drafter.config.sliding_window
    for n, end in enumerate(ends):
        result["dumps"].append(to_bytes(pages.rows(slot_of(n), range(max(0, end - window), end))))
    return result


def drive(groups: Groups, mode: str, bounded: bool, slab_blocks: int) -> dict:
    dp_rank = groups.topology.coordinates(groups.rank).dp_rank
    return drive_group(groups, mode, dp_rank, bounded, slab_blocks)


def agree(a: torch.Tensor, b: torch.Tensor, mode: str) -> bool:
    if mode == "float64":
        return bool(torch.allclose(a, b, rtol=0, atol=1e-10))
    return same_bits(a, b)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 4), (2, 1, 2), (4, 4, 4)])
@pytest.mark.parametrize(("mode", "bounded", "slab_blocks"), [("float64", True, 2), ("float32", False, 3)])
def test_ranks_draft_as_one(
    ranks: RankPools, sizes: tuple[int, int, int], mode: str, bounded: bool, slab_blocks: int
) -> None:
    """Caches hold other noise on every rank before the run. Slabs are cut, some have no block at all; tp_rank 1 of the
    second group in (4, 2, 4) never has one, and tp_rank 3 in (4, 4, 4) has none the second time."""
    check_ranks(ranks, sizes, mode, bounded, slab_blocks)


@pytest.mark.parametrize("mode", ["bfloat16", "w8a8"])
def test_ranks_draft_as_one_in_narrow_modes(ranks: RankPools, mode: str) -> None:
    check_ranks(ranks, (4, 2, 4), mode, True, 16)


def check_ranks(ranks: RankPools, sizes: tuple[int, int, int], mode: str, bounded: bool, slab_blocks: int) -> None:
    if mode != "float64" and not row_independence(draft_config(), (numerics(mode),))["holds"]:
        pytest.skip("this machine's products depend on the row count")
    topology = Topology(*sizes)
    options = {"mode": mode, "bounded": bounded, "slab_blocks": slab_blocks}
    results = ranks.run(topology, "test_dspark_ranks:drive", timeout=100, **options)
    for dp_rank in range(topology.dp):
        members = [result for result in results if result["dp_rank"] == dp_rank]
        twin = drive_group(Groups.single(), mode, dp_rank, bounded, slab_blocks)
        want = {(step, n): parts for step, n, *parts in twin["drafts"]}
        got = {(step, n): parts for member in members for step, n, *parts in member["drafts"]}
        assert got.keys() == want.keys()
        for key, parts in want.items():
            for index, (mine, single) in enumerate(zip(got[key], parts, strict=True)):
                assert agree(from_bytes(mine), from_bytes(single), mode), (key, ("ids", "logits", "confidence")[index])
        for member in members:
            assert member["dumps"] == members[0]["dumps"], "caches differ in a group"
        for mine, single in zip(members[0]["dumps"], twin["dumps"], strict=True):
            assert agree(from_bytes(mine), from_bytes(single), mode)


def count_calls(groups: Groups, gamma: int) -> int:
    """Exchanges of this rank in one slab."""
    drafter = draft_model(groups, "float64", shape=DraftShape(gamma, 5, 4))
    pages = Pages(drafter, SLOTS, MAX_FRESH, PAGE, seed=1)
    before = groups.tp.sequence + groups.ep.sequence
    if groups.tp.rank == 0:
        position = np.arange(8)
        band = [(1, 0, int(p), True) for p in position]
    else:
        band = []
    pages.extend(0, 8)
    with torch.no_grad():
        band_write(drafter, pages, band, 8)
    drafts_of(drafter, pages, [(1, 0, 8)] if groups.tp.rank == 0 else [], slabs=1)
    return groups.tp.sequence + groups.ep.sequence - before


def test_exchanges_do_not_grow_with_the_drafts(ranks: RankPools) -> None:
    """Context rows of all stages: 1. Each stage: heads, sums, counts, rows, results. The head: rows, logits."""
    few, many = (
        ranks.run(Topology(2, 2, 2), "test_dspark_ranks:count_calls", timeout=60, gamma=gamma) for gamma in (1, 5)
    )
    assert few == many == [1 + 2 * 5 + 2] * 2
