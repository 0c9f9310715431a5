"""A drafter's context rows in the caches of a model: pages, prefixes, stamps of requests, and what of them is drafted.

One rank of tiny-dspark in FP64 runs the steps as an engine does: extend, target, context rows, drafts, commit.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from meshspark.layouts.bits import same_bits
from meshspark.layouts.rows import RequestRows
from meshspark.models.checkpoint.synthetic import random_weights
from meshspark.models.dspark.context import draft_pool, name_rows, write_context
from meshspark.models.dspark.draft import draft
from meshspark.models.dspark.drafter import Drafter, make_drafter
from meshspark.models.dspark.plan import DraftBlock, plan_draft
from meshspark.models.dspark.projector import context_keys, draft_taps, join_taps, project
from meshspark.models.numerics import FLOAT64
from meshspark.models.v4.caches import Caches, poison
from meshspark.models.v4.config import flash_dspark, tiny, tiny_dspark, tiny_mtp
from meshspark.models.v4.model import Model
from meshspark.models.v4.pools import DRAFT_FAMILY, CacheShape, cache_families, engine_shape, pool_shapes
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

SLOTS, CONTEXT, FRESH, VERIFIED = 3, 400, 150, 6


@cache
def parts() -> tuple[Model, Drafter]:
    config, groups = tiny_dspark(), Groups.single()
    weights = random_weights(config, 7, FLOAT64, draft=True)
    model = Model(config, weights, groups, FLOAT64)
    return model, make_drafter(config, weights, model.embed, model.head, groups, FLOAT64)


def make_caches(points: int = 4) -> Caches:
    shape = engine_shape(
        tiny_dspark(), FLOAT64, requests=SLOTS, max_context=CONTEXT, prefill_rows=FRESH, verify_rows=VERIFIED,
        block_size=32, prefix_points=points, draft_stages=3,
    )  # fmt: skip
    caches = parts()[0].make_caches(shape)
    poison(caches)
    return caches


def text_of(seed: int, length: int = CONTEXT) -> list[int]:
    return torch.randint(2, 260, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def run_rows(caches: Caches, slot: int, tokens: Sequence[int], start: int, count: int, kept: int | None = None) -> None:
    """One step of rows start to start + count - 1, of which the first `kept` are accepted."""
    model, drafter = parts()
    plan = model.plan([RequestRows(slot, start, list(tokens[start : start + count]), asked=(count - 1,))], caches)
    assert DRAFT_FAMILY not in plan.writes, "no layer writes context rows"
    output = model.forward(plan, caches, draft_taps(model.config))
    position = plan.rows.position_G
    keys = context_keys(project(join_taps(output.taps, model.config), drafter), position, drafter)
    kept = count if kept is None else kept
    names = name_rows(
        np.full(count, slot), np.full(count, caches.generation(slot)), position.numpy(), np.arange(count) < kept
    )
    write_context(keys, names, draft_pool(caches), drafter)
    caches.commit(slot, tokens, start + kept)
    caches.check_integrity()


def drafted(caches: Caches, slot: int, tokens: Sequence[int], anchor: int) -> torch.Tensor:
    """Corrected logits [gamma, V] of a block whose anchor stands there."""
    pool = draft_pool(caches)
    with torch.no_grad():
        plan = plan_draft([DraftBlock(slot, anchor, tokens[anchor])], parts()[1], pool.table)
        got = draft(plan, parts()[1], pool.keys_MSD, keep_logits=True)
    assert got.logits is not None and bool(got.logits.isfinite().all()), "a row was read that nobody wrote"
    return got.logits[0]


def cold(
    tokens: Sequence[int], length: int, chunks: Sequence[int] = ()
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Drafts behind `length` positions of a request that has the caches for itself, and the dump there."""
    caches = make_caches(0)
    caches.admit(1, CONTEXT)
    start = 0
    for count in [*chunks, *[FRESH] * 9]:
        count = min(count, length - start)
        if count:
            run_rows(caches, 1, tokens, start, count)
            start += count
    return drafted(caches, 1, tokens, length), caches.dump(1, length)


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, rows in wanted.items():
        torch.testing.assert_close(found[name], rows, rtol=0, atol=1e-10, msg=name)


def test_prefill_in_chunks_drafts_as_one_shot() -> None:
    tokens = text_of(1)
    drafts, dump = cold(tokens, 140)
    assert dump[DRAFT_FAMILY].shape == (3, 16, 32) and dump["window_kv"].shape == (5, 15, 32)
    for chunks in ((1, 2, 29, 33), (16, 17, 15, 16, 17)):
        again, same = cold(tokens, 140, chunks)
        torch.testing.assert_close(again, drafts, rtol=0, atol=1e-10)
        assert_close(same, dump)


def test_a_prefix_hit_drafts_as_a_cold_run() -> None:
    """Also where the request that published it is gone, and its slot and pages are another's."""
    tokens, other = text_of(1), text_of(2)
    caches = make_caches()
    assert caches.admit(0, CONTEXT, tokens[:140]) == 0
    run_rows(caches, 0, tokens, 0, 140)
    caches.release(0)
    caches.admit(0, CONTEXT, other[:30])
    run_rows(caches, 0, other, 0, 30)
    assert caches.admit(2, CONTEXT, tokens[:130]) == 128
    wanted = cold(tokens, 128)
    torch.testing.assert_close(drafted(caches, 2, tokens, 128), wanted[0], rtol=0, atol=1e-10)
    assert_close(caches.dump(2, 128), wanted[1])
    run_rows(caches, 2, tokens, 128, 3)
    wanted = cold(tokens, 131)
    torch.testing.assert_close(drafted(caches, 2, tokens, 131), wanted[0], rtol=0, atol=1e-10)
    assert_close(caches.dump(2, 131), wanted[1])
    torch.testing.assert_close(drafted(caches, 0, other, 30), cold(other, 30)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("start", [3, 14, 30, 31, 126])
def test_rejected_rows_leave_drafts_as_serial_decoding_does(start: int) -> None:
    """Steps of 6 rows, of which 1 to 6 are accepted, around page ends, the window and a published point."""
    tokens, wrong = text_of(1), text_of(3)
    caches = make_caches()
    caches.admit(1, CONTEXT)
    run_rows(caches, 1, tokens, 0, start)
    length = start
    for kept in (1, 3, 6, 2):
        tried = [*tokens[: length + kept], *wrong[length + kept :]]
        run_rows(caches, 1, tried, length, VERIFIED, kept)
        length += kept
        assert caches.context_Q.tolist() == [0, length, 0]
        serial = cold(tokens, length, [start, *[1] * (length - start)])
        torch.testing.assert_close(drafted(caches, 1, tokens, length), serial[0], rtol=0, atol=1e-10)
        assert_close(caches.dump(1, length), serial[1])


def test_pages_of_all_rows_of_a_verification_are_mapped_before_they_are_written() -> None:
    caches = make_caches()
    caches.admit(0, CONTEXT)
    for start, count in ((0, 31), (31, VERIFIED)):
        caches.extend(0, start, count)
        slots = caches.tables[DRAFT_FAMILY].slots(torch.tensor(0), torch.arange(start + count))
        assert len(set(slots.tolist())) == start + count and int(slots.min()) >= 0
    with pytest.raises(RuntimeError, match="draft_kv: request slot 0 has context rows of 0 positions, 31 are commit"):
        caches.commit(0, text_of(1), 31)
    caches.context_Q[0] = 31
    caches.commit(0, text_of(1), 31)


def test_nothing_is_published_whose_context_rows_are_not_written() -> None:
    """A step that wrote none: the point would give its finder a window of nobody. What the slot's last request wrote
    does not count."""
    model, tokens = parts()[0], text_of(1)
    caches = make_caches()
    caches.admit(0, CONTEXT)
    run_rows(caches, 0, text_of(2), 0, 127)
    run_rows(caches, 0, text_of(2), 127, 120)
    caches.release(0)
    while caches.prefixes.give_state():
        pass
    caches.admit(0, CONTEXT)
    run_rows(caches, 0, tokens, 0, 120)
    with torch.no_grad():
        model.forward(model.plan([RequestRows(0, 120, tokens[120:130], asked=(9,))], caches), caches)
    with pytest.raises(RuntimeError, match="context rows of 120 positions, 130 are committed"):
        caches.commit(0, tokens, 130)
    assert not caches.prefixes.points
    caches.check_integrity()


def test_a_late_write_of_a_former_request_leaves_no_trace() -> None:
    drafter, tokens = parts()[1], text_of(1)
    caches = make_caches()
    nobody = caches.generation(0)
    caches.admit(0, CONTEXT)
    stamps = [caches.generation(0)]
    assert stamps[0] != nobody
    run_rows(caches, 0, tokens, 0, 20)
    pool, position = draft_pool(caches), np.arange(20, 24)
    late = name_rows(np.zeros(4, np.int64), np.full(4, stamps[0]), position)
    keys = torch.ones(3, 4, 32, dtype=torch.float64)

    def arrives() -> bool:
        before, ends = pool.keys_MSD.clone(), pool.context_Q.copy()
        write_context(keys, late, pool, drafter)
        return not same_bits(pool.keys_MSD, before) or bool((pool.context_Q != ends).any())

    caches.release(0)
    assert not arrives(), "nobody has the slot"
    assert caches.generation(0) not in (nobody, stamps[0])
    stamps.append(caches.generation(0))
    caches.admit(0, CONTEXT)
    assert caches.generation(0) not in stamps
    stamps.append(caches.generation(0))
    run_rows(caches, 0, tokens, 0, 24)
    assert not arrives(), "another has it"
    with pytest.raises(ValueError, match="request slot 0 is taken"):
        caches.admit(0, CONTEXT)
    assert caches.generation(0) == stamps[2], "an admission that is refused changes nothing"
    late[:, 1] = stamps[2]
    assert arrives(), "the request's own rows are written"


def test_a_shape_without_drafter_has_none_of_it() -> None:
    caches = Caches(tiny_dspark(), CacheShape(2, 64, 8), FLOAT64, Topology())
    assert DRAFT_FAMILY not in caches.pools and caches.families == caches.layer_families
    caches.admit(0, 64)
    caches.extend(0, 0, 8)
    caches.commit(0, text_of(1), 8)
    with pytest.raises(ValueError, match="draft_stages of the caches is 0"):
        draft_pool(caches)


def test_stages_are_those_of_the_model() -> None:
    for config, stages in ((tiny(), 1), (tiny_dspark(), 1), (tiny_mtp(), 3)):
        allowed = len(config.draft_ratios)
        with pytest.raises(ValueError, match=f"draft_stages is {stages}, allowed: 0, or {allowed} as the model has"):
            Caches(config, CacheShape(1, 64, 8, draft_stages=stages), FLOAT64, Topology())
    for config in (tiny_mtp(), flash_dspark()):
        shape = CacheShape(1, 640, 8, draft_stages=len(config.draft_ratios))
        pool, family = pool_shapes(config, shape, FLOAT64)[DRAFT_FAMILY], cache_families(config, shape)[-1]
        assert (pool.layers, pool.columns) == (len(config.draft_ratios), config.head_dim)
        assert family.readable(500) == range(500 - config.sliding_window, 500)
    assert Caches(tiny_mtp(), CacheShape(1, 64, 8, draft_stages=1), FLOAT64, Topology()).layers_of(
        cache_families(tiny_mtp(), CacheShape(1, 64, 8, draft_stages=1))[-1]
    ) == (0,)
