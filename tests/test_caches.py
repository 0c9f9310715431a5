"""Pages of caches: shared prefixes, reclaim behind the window, memory budgets. What a page holds is told by its rows:
each row carries a number made from all tokens up to its position, so that a page of another sequence shows."""

import random
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from meshspark.layouts.pages import PageFamily
from meshspark.models.numerics import BFLOAT16, FLOAT64
from meshspark.models.v4.caches import Caches
from meshspark.models.v4.config import PRESETS, flash, tiny
from meshspark.models.v4.pools import CacheShape, engine_shape, pool_shapes
from meshspark.parallel.topology import Topology

CONTEXT, FRESH, SLOTS = 700, 160, 4


def stamps(tokens: list[int]) -> list[float]:
    """For each position a number that two different beginnings do not share."""
    value, found = 1, []
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (1 << 51)
        found.append(float(value))
    return found


def family_rows(family: PageFamily, marks: list[float], rows: range) -> torch.Tensor:
    """The rows of a family at these indices: each ends at one position."""
    per_row = family.ratio if family.per_entry and family.ratio else 1
    return torch.tensor([marks[(index + 1) * per_row - 1] for index in rows], dtype=torch.float64)


def write_rows(caches: Caches, slot: int, marks: list[float], start: int, count: int) -> None:
    """What a step writes of positions start to start + count - 1: stamps, in every family and layer."""
    for family in caches.families:
        old, new = family.rows(start), family.rows(start + count)
        rows = family_rows(family, marks, range(old, new))
        slots = caches.tables[family.name].slots(torch.tensor(slot), torch.arange(old, new))
        assert bool((slots >= 0).all()), f"{family.name}: rows {old} to {new} of slot {slot} have no page"
        caches.pools[family.name][:, slots] = rows[None, :, None]
    caches.context_Q[slot] = start + count


def check_rows(caches: Caches, slot: int, marks: list[float], length: int) -> None:
    """All that the next step of this slot may read is its own."""
    dump = caches.dump(slot, length)
    for family in caches.families:
        got, want = dump[family.name], family_rows(family, marks, family.readable(length))
        assert torch.equal(got, want[None, :, None].expand_as(got)), family.name


def poison_free(caches: Caches) -> None:
    """NaN in every page that nobody holds."""
    for name, pages in caches.pages.items():
        by_page = caches.pools[name].unflatten(1, (-1, caches.tables[name].page))
        by_page[:, pages.free] = float("nan")


@dataclass
class Sequence:
    """A request of the random traffic."""

    tokens: list[int]
    marks: list[float]
    length: int
    limit: int


def small_caches(points: int, tight: bool, block_size: int = 32, preset: str = "tiny") -> Caches:
    config = PRESETS[preset]()
    stages = len(config.draft_ratios)
    shape = engine_shape(
        config,
        FLOAT64,
        requests=SLOTS,
        max_context=CONTEXT,
        prefill_rows=FRESH,
        verify_rows=3,
        block_size=block_size,
        prefix_points=points,
        draft_stages=stages,
    )
    if tight:
        pages = dict(shape.pages or {})
        pages.update(csa_kv=9, csa_index=9, hca_kv=8)
        shape = CacheShape(SLOTS, CONTEXT, FRESH, block_size, pages, points, stages)
    return Caches(config, shape, FLOAT64, Topology())


QUICK = [(0, False, 32), (3, False, 128), (30, False, 64), (3, True, 32), (30, True, 32)]
ALL = [(p, t, b) for p, t in ((0, False), (3, False), (30, False), (3, True), (30, True)) for b in (32, 64, 128)]


@pytest.mark.parametrize(
    "points,tight,block_size", [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in ALL]
)
def test_whatever_happens_every_sequence_reads_its_own_rows(points: int, tight: bool, block_size: int) -> None:
    """Random admissions with shared beginnings, chunks, decode and rejected rows, ends; pages poisoned when free."""
    draw = random.Random(points * 10 + tight)
    stems = [[draw.randrange(3) for _ in range(CONTEXT)] for _ in range(2)]
    caches = small_caches(points, tight, block_size, "tiny-dspark")
    running: dict[int, Sequence] = {}
    hits = refused = 0
    for _ in range(110):
        free = [slot for slot in range(SLOTS) if slot not in running]
        if free and draw.random() < 0.5:
            slot, stem, shared = draw.choice(free), draw.choice(stems), draw.choice((0, 127, 128, 129, 256, 300, 384))
            tokens = stem[:shared] + [draw.randrange(3, 9) for _ in range(draw.choice((1, 30, 140)))]
            limit = len(tokens) + draw.choice((1, 40))
            try:
                length = caches.admit(slot, limit, tokens)
            except ValueError:
                refused += 1
                assert tight
                continue
            assert length % 128 == 0 and length < len(tokens)
            hits += length > 0
            whole = tokens + [9] * (limit - len(tokens))
            running[slot] = Sequence(whole, stamps(whole), length, limit)
            check_rows(caches, slot, running[slot].marks, length)
        budget = FRESH
        for slot in draw.sample(sorted(running), draw.randint(0, len(running))):
            one = running[slot]
            count = min(one.limit - one.length, draw.choice((1, 2, 3, 64, 128, FRESH)))
            count = count if count <= 3 else min(count, budget)
            budget -= count if count > 3 else 0
            if count < 1:
                continue
            caches.extend(slot, one.length, count)
            write_rows(caches, slot, one.marks, one.length, count)
            kept = draw.randint(1, count) if count <= 3 else count
            one.length += kept
            caches.commit(slot, one.tokens, one.length)
            check_rows(caches, slot, one.marks, one.length)
        for slot in [s for s, one in running.items() if one.length == one.limit or draw.random() < 0.05]:
            caches.release(slot)
            del running[slot]
        caches.check_integrity()
        poison_free(caches)
        for slot, one in running.items():
            check_rows(caches, slot, one.marks, one.length)
    assert (hits > 3) == (points > 0) and (refused > 0) == tight


def test_pages_behind_the_window_are_given_back() -> None:
    caches = small_caches(0, False)
    caches.admit(0, CONTEXT)
    for start in range(0, 640, FRESH):
        caches.extend(0, start, FRESH)
        caches.commit(0, [0] * CONTEXT, start + FRESH)
    used = {name: pages.used for name, pages in caches.pages.items()}
    # The next query reads 15 positions of the window and 4 of the ratio-4 states; 640 tokens are 5 blocks.
    assert used == {
        "window_kv": 1,
        "csa_kv": 5,
        "csa_index": 5,
        "csa_state": 2,
        "index_state": 2,
        "hca_kv": 5,
        "hca_state": 0,
    }


def test_what_is_published_outlives_its_request_and_goes_when_room_is_needed() -> None:
    caches = small_caches(2, True)
    text = list(range(400))
    caches.admit(0, 400, text)
    for start in range(0, 400, 100):
        caches.extend(0, start, 100)
        write_rows(caches, 0, stamps(text), start, 100)
        caches.commit(0, text, start + 100)
    caches.release(0)
    assert len(caches.prefixes.points) == 3, "128, 256 and 384 tokens"
    assert caches.admit(1, 400, text) == 384
    caches.release(1)
    # Two points may have state: 128 lost it when 384 came, and can only be passed through.
    assert caches.admit(1, 400, text[:200]) == 0
    caches.release(1)
    assert caches.admit(1, 400, [*text[:256], 0]) == 256
    caches.release(1)
    # Another sequence needs six of the eight pages of hca_kv; the longest unused points go.
    caches.admit(2, 700, [1])
    for start in range(0, 700, 100):
        caches.extend(2, start, 100)
        caches.commit(2, [1] * 700, start + 100)
    caches.release(2)
    assert caches.admit(0, 400, text) == 0
    caches.check_integrity()


def test_a_prompt_of_whole_blocks_keeps_its_last_block_to_run() -> None:
    caches = small_caches(4, False)
    text = [0] * 256
    caches.admit(0, 300, text)
    for start in (0, 128):
        caches.extend(0, start, 128)
        caches.commit(0, text, start + 128)
    assert caches.admit(1, 300, text) == 128
    assert caches.admit(2, 300, [*text, 7]) == 256


def test_more_rows_than_a_ring_holds_are_refused() -> None:
    caches = small_caches(0, False)
    caches.admit(0, CONTEXT)
    with pytest.raises(ValueError, match=f"brings {FRESH + 1} rows, allowed: max_fresh {FRESH}"):
        caches.extend(0, 0, FRESH + 1)


def test_a_pool_that_runs_dry_says_so_and_loses_nothing() -> None:
    """Blocks of rows far beyond those for which the rings were made."""
    caches = small_caches(0, False)
    for slot in range(SLOTS):
        caches.admit(slot, CONTEXT)
    with pytest.raises(RuntimeError, match="pages are held by requests that run"):
        for slot in range(SLOTS):
            caches.extend(slot, 0, FRESH)
    caches.check_integrity()


def test_lost_and_shared_pages_are_seen() -> None:
    caches = small_caches(0, False)
    caches.admit(0, 100)
    caches.extend(0, 0, 100)
    caches.check_integrity()
    lost = int(caches.tables["window_kv"].table[0, 1])
    caches.tables["window_kv"].table[0, 1] = -1
    with pytest.raises(RuntimeError, match=f"window_kv: page {lost} has 0 holders, 1 references"):
        caches.check_integrity()
    caches.tables["window_kv"].table[0, 1] = caches.tables["window_kv"].table[0, 0]
    with pytest.raises(RuntimeError, match="window_kv: request slot 0 has a page twice"):
        caches.check_integrity()


def test_a_budget_is_kept_and_one_that_is_too_small_is_refused() -> None:
    """Flash's own figures: 6,229 bytes a token of full history with INT8 index rows, 7,456 with BF16 ones."""
    million = 1 << 20
    config = flash()
    assert config.max_position_embeddings >= million
    shape = engine_shape(
        config, BFLOAT16, requests=64, max_context=million, prefill_rows=512, verify_rows=8, cache_bytes=16 << 30
    )
    pools = pool_shapes(config, shape, BFLOAT16)
    total = sum(pool.nbytes for pool in pools.values())
    per_block = sum(pools[name].page_bytes for name in ("csa_kv", "csa_index", "hca_kv"))
    assert Fraction(per_block, 128) == Fraction(21 * (1024 + 256), 4) + Fraction(20 * 1024, 128)
    assert (16 << 30) - per_block < total <= 16 << 30
    assert {name: pool.depth for name, pool in pools.items() if pool.depth == 8192}.keys() == {
        "csa_kv",
        "csa_index",
        "hca_kv",
    }
    assert pools["window_kv"].pages == 64 * (5 + 1) + 16
    with pytest.raises(ValueError, match=r"cache budget is 5,368,709,120 bytes, allowed: .* or more"):
        engine_shape(config, BFLOAT16, requests=1, max_context=million, prefill_rows=1, cache_bytes=5 << 30)


def test_the_ceiling_itself_is_admissible_and_one_more_is_not() -> None:
    config = tiny()
    ceiling = config.max_position_embeddings
    shape = engine_shape(config, FLOAT64, requests=1, max_context=ceiling, prefill_rows=8)
    caches = Caches(config, shape, FLOAT64, Topology())
    caches.admit(0, ceiling)
    with pytest.raises(ValueError, match=f"limit is {ceiling + 1} positions, allowed: 1 to max_context {ceiling}"):
        caches.admit(0, ceiling + 1)
    with pytest.raises(ValueError, match=f"max_context is {ceiling + 1}"):
        Caches(config, CacheShape(1, ceiling + 1, 1), FLOAT64, Topology())
