"""The MTP layer over many ranks and in company: ragged steps draft what one rank, and a naive layer, draft."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from mtp_scene import SLOTS, Anchor, Row, Scene, check_naive, mtp_config, mtp_layer, run_text, streams_of
from rank_pool import RankPools, from_bytes, to_bytes

from meshspark.layouts.bits import same_bits
from meshspark.models.dspark.draft import Drafts
from meshspark.models.dspark.proposer import Room
from meshspark.models.numerics import numerics
from meshspark.models.selfcheck import row_independence
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

PROMPTS = ((10, 21), (11, 3), (12, 34), (13, 15), (14, 40))
"""(request, length of its prompt)."""

SECOND_STEP = (0, 2, 4)
"""Of the requests those that draft in the second step: none of an odd tp_rank of two."""


def slot_of(number: int) -> int:
    return (3 * number + 1) % SLOTS


def prompt_bands(prompts: Sequence[tuple[int, int]], tp: int) -> list[list[Row]]:
    """All prompts: a request's last row in its owner's band, the others dealt out."""
    bands: list[list[Row]] = [[] for _ in range(tp)]
    for number, (request, length) in enumerate(prompts):
        for position in range(length):
            rank = number % tp if position == length - 1 else (position // 3) % tp
            bands[rank].append(Row(request, slot_of(number), position))
    return bands


def verify_bands(prompts: Sequence[tuple[int, int]], ends: Sequence[int], kept: Sequence[int], tp: int) -> list:
    """Two rows of each request in its owner's band: anchor and draft, of which one or both are kept."""
    bands: list[list[Row]] = [[] for _ in range(tp)]
    for number, (request, _) in enumerate(prompts):
        for j in range(2):
            bands[number % tp].append(Row(request, slot_of(number), ends[number] + j, j < kept[number]))
    return bands


def drive(groups: Groups, mode: str, slab_blocks: int) -> dict:
    return drive_group(groups, mode, slab_blocks, groups.topology.coordinates(groups.rank).dp_rank)


def drive_group(groups: Groups, mode: str, slab_blocks: int, dp_rank: int) -> dict:
    """One rank's part of three steps: prompts, and two verifications. Other dp groups than the first have nothing."""
    tp, tp_rank = groups.tp.size, groups.tp.rank
    layer = mtp_layer(groups, mode, slab_blocks=slab_blocks)
    scene = Scene(layer, seed=100 + groups.rank, fresh=48, tp_rank=tp_rank)
    prompts = PROMPTS if dp_rank == 0 else ()
    result: dict[str, Any] = {"dp_rank": dp_rank, "drafts": [], "again": [], "dumps": []}
    ends = [length for _, length in prompts]
    for step in range(3):
        kept = [1 + (number + step) % 2 for number in range(len(prompts))]
        bands = verify_bands(prompts, ends, kept, tp) if step else prompt_bands(prompts, tp)
        streams = scene.keep(bands)
        ends = [end + count for end, count in zip(ends, kept, strict=True)] if step else ends
        drafting = [n for n in range(len(prompts)) if step != 1 or n in SECOND_STEP]
        anchors = {n: Anchor(prompts[n][0], slot_of(n), ends[n]) for n in drafting}
        mine = [n for n in drafting if n % tp == tp_rank]
        rows = [place_of(bands[tp_rank], anchors[n]) for n in mine]
        room = Room(tuple(sum(n % tp == rank for n in drafting) for rank in range(tp)), len(PROMPTS))
        got = scene.propose([anchors[n] for n in mine], streams, rows, room)
        result["drafts"] += packed(step, mine, got)
        if mode == "float64":
            for place, n in enumerate(mine):
                check_naive(scene, got, place, anchors[n], PROMPTS[n][1] + 4)
    # Every rank of the group drafts for all of it, from its own replica of the context.
    every = [streams_of(layer.config, request, end - 1) for (request, _), end in zip(prompts, ends, strict=True)]
    whole = torch.stack(every).to(layer.numerics.stream) if every else streams
    all_of = [Anchor(request, slot_of(n), ends[n]) for n, (request, _) in enumerate(prompts)]
    got = scene.propose(all_of, whole, range(len(prompts)), Room((len(prompts),) * tp, len(PROMPTS)))
    result["again"] = packed(2, range(len(prompts)), got)
    result["dumps"] = [to_bytes(scene.context(slot_of(n), end)) for n, end in enumerate(ends)]
    return result


def place_of(band: Sequence[Row], anchor: Anchor) -> int:
    return next(t for t, r in enumerate(band) if (r.request, r.position) == (anchor.request, anchor.position - 1))


def packed(step: int, numbers: Sequence[int], got: Drafts) -> list:
    assert got.logits is not None and got.ids.shape == got.confidence.shape == (len(numbers), 1)
    return [
        [step, n, *map(to_bytes, (got.ids[place], got.logits[place], got.confidence[place]))]
        for place, n in enumerate(numbers)
    ]


def by_block(drafts: list) -> dict[tuple[int, int], list[torch.Tensor]]:
    return {(step, n): [from_bytes(part) for part in parts] for step, n, *parts in drafts}


def test_ragged_steps_agree_with_the_naive_layer() -> None:
    """Requests in unsorted slots with gaps, rejected rows, padding, slabs that are cut; one rank."""
    drive_group(Groups.single(), "float64", 2, 0)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 1, 2)])
def test_ranks_draft_as_one(ranks: RankPools, sizes: tuple[int, int, int]) -> None:
    """In (2, 2, 2) tp_rank 1 has no block in the second step, in (2, 1, 2) dp_rank 1 has no row at all."""
    check_ranks(ranks, sizes, "float32", 2)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 4), (4, 4, 4), (4, 1, 4)])
@pytest.mark.parametrize("mode", ["float64", "float32", "bfloat16", "w8a8"])
def test_more_ranks_draft_as_one(ranks: RankPools, sizes: tuple[int, int, int], mode: str) -> None:
    check_ranks(ranks, sizes, mode, 16)


def check_ranks(ranks: RankPools, sizes: tuple[int, int, int], mode: str, slab_blocks: int) -> None:
    if mode != "float64" and not row_independence(mtp_config(), (numerics(mode),))["holds"]:
        pytest.skip("this machine's products depend on the row count")

    def agree(a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.allclose(a, b, rtol=0, atol=1e-10) if mode == "float64" else same_bits(a, b)

    results = ranks.run(Topology(*sizes), "test_mtp_ranks:drive", timeout=100, mode=mode, slab_blocks=slab_blocks)
    twin = drive_group(Groups.single(), mode, slab_blocks, 0)
    members = [result for result in results if result["dp_rank"] == 0]
    want = by_block(twin["drafts"])
    got = by_block([draft for member in members for draft in member["drafts"]])
    assert got.keys() == want.keys() and len(want) == 5 + 3 + 5
    again = by_block(twin["again"])
    for key, parts in again.items():
        assert all(agree(a, b) for a, b in zip(parts, want[key], strict=True)), "drafting again changes nothing"
    for key, parts in want.items():
        for name, mine, single in zip(("ids", "logits", "confidence"), got[key], parts, strict=True):
            assert agree(mine, single), (key, name)
    for member in members:
        assert member["dumps"] == members[0]["dumps"], "ranks hold different keys"
        assert mode == "float64" or member["again"] == members[0]["again"], "ranks draft differently"
        for key, parts in by_block(member["again"]).items():
            assert all(agree(a, b) for a, b in zip(parts, again[key], strict=True)), key
        for mine, single in zip(member["dumps"], twin["dumps"], strict=True):
            assert agree(from_bytes(mine), from_bytes(single))
    for other in (result for result in results if result["dp_rank"]):
        assert not other["drafts"] and not other["again"] and not other["dumps"]


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "w8a8"])
def test_company_changes_no_bit(mode: str) -> None:
    """Alone in other chunks, and beside others: the same bits."""
    if not row_independence(mtp_config(), (numerics(mode),))["holds"]:
        pytest.skip("this machine's products depend on the row count")
    together = {n: parts for (step, n), parts in by_block(drive_group(Groups.single(), mode, 16, 0)["drafts"]).items()
                if step == 0}  # fmt: skip
    for number, (request, length) in enumerate(PROMPTS):
        chunks = [length % 13, *[13] * (length // 13)]
        scene, alone = run_text(chunks, mode=mode, request=request, slot=number)
        assert alone.logits is not None and alone.logits.dtype == scene.layer.numerics.accumulation
        for mine, other in zip((alone.ids, alone.logits, alone.confidence), together[number], strict=True):
            assert same_bits(mine[0], other)
