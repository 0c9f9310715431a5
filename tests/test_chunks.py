"""Chunks, splits and company do not matter: rows, caches and ids are those of one call."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from episodes import CONTEXT, permute_pages, single_model, twin_logits
from test_verify import restore

from meshspark.layouts.bits import same_bits
from meshspark.layouts.rows import RequestRows
from meshspark.models.checkpoint.synthetic import random_weights
from meshspark.models.numerics import FLOAT32
from meshspark.models.v4.caches import poison
from meshspark.models.v4.config import tiny
from meshspark.models.v4.model import Model
from meshspark.models.v4.pools import CacheShape
from meshspark.parallel.groups import Groups

MODE = "float32"
PRESET = "tiny"
LENGTH = 300


def text(seed: int, length: int = LENGTH) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(2, 264) for _ in range(length))


def drive(
    sequences: list[tuple[tuple[int, ...], list[int]]], seed: int = 0, max_fresh: int = LENGTH, mode: str = MODE
) -> tuple:
    """Run each (tokens, chunk lengths) as a request, all packed in the same steps -> (logits per request, dumps)."""
    model = single_model(PRESET, mode)
    caches = model.make_caches(CacheShape(len(sequences), CONTEXT, max_fresh))
    poison(caches)
    permute_pages(caches, seed)
    for slot in range(len(sequences)):
        caches.admit(slot, CONTEXT)
    done = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in range(max(len(chunks) for _, chunks in sequences)):
        rows = []
        for slot, (tokens, chunks) in enumerate(sequences):
            count = min(chunks[step], len(tokens) - done[slot]) if step < len(chunks) else 0
            if count:
                part = tokens[done[slot] : done[slot] + count]
                rows.append(RequestRows(slot, done[slot], part, kind="prefill", asked=range(count)))
                done[slot] += count
        with torch.no_grad():
            output = model.forward(model.plan(rows, caches), caches)
        assert output.logits is not None
        for (index, _), row in zip(output.owned, output.logits, strict=True):
            logits[rows[index].slot].append(row)
    assert done == [len(tokens) for tokens, _ in sequences]
    return [torch.stack(rows) for rows in logits], [caches.dump(slot, n) for slot, n in enumerate(done)]


def equal_dumps(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


@pytest.mark.parametrize("small", [(), pytest.param((1, 3), marks=pytest.mark.slow)])
def test_chunks_of_any_size_give_one_calls_bits(small: tuple[int, ...]) -> None:
    """With the caches, the tokens that follow are the same too."""
    tokens = text(1)
    draw = random.Random(9)
    sizes = [[n] * (LENGTH // n + 1) for n in (31, 32, 33, 127, 128, 129, 300, *small)]
    sizes.append([draw.randrange(1, 40) for _ in range(40)])
    want = twin_logits(PRESET, MODE, tokens)
    logits, dumps = drive([(tokens, chunks) for chunks in sizes])
    for chunks, got, dump in zip(sizes, logits, dumps, strict=True):
        assert same_bits(got, want), chunks[:3]
        assert equal_dumps(dump, dumps[6]), chunks[:3]


SPLITS = (*range(1, 9), 15, 16, 17, 31, 32, 33, 59, 60, 61, 62, 63, 64)


@pytest.mark.parametrize("firsts", [SPLITS, pytest.param(range(1, 65), marks=pytest.mark.slow)])
def test_every_split_of_64_tokens_pools_the_same_entries(firsts: Sequence[int]) -> None:
    """A ratio-4 entry pools eight positions however its window was cut, entry 0 its four."""
    tokens = text(2, 64)
    splits = [[k, *[1] * (64 - k)] for k in firsts]
    logits, dumps = drive([(tokens, split) for split in splits])
    want = twin_logits(PRESET, MODE, tokens)
    for split, got, dump in zip(splits, logits, dumps, strict=True):
        assert same_bits(got, want), split[0]
        assert equal_dumps(dump, dumps[-1]), split[0]


def test_every_length_then_one_more_token() -> None:
    """No residue of a length modulo 4, 32 or 128 is special: prefill(L) and one row equal prefill(L + 1)."""
    tokens = text(3, 270)
    want = twin_logits(PRESET, MODE, tokens)
    model = single_model(PRESET, MODE)
    for first in range(1, 270, 30):
        lengths = range(first, min(first + 30, 270))
        _, dumps = drive([(tokens[:n], [n]) for n in lengths])
        caches = model.make_caches(CacheShape(len(lengths), CONTEXT, 1))
        poison(caches)
        permute_pages(caches, first)
        rows = []
        for slot, (n, dump) in enumerate(zip(lengths, dumps, strict=True)):
            caches.admit(slot, CONTEXT)
            restore(caches, slot, n, dump)
            rows.append(RequestRows(slot, n, [tokens[n]], kind="decode", asked=(0,)))
        with torch.no_grad():
            output = model.forward(model.plan(rows, caches), caches)
        assert output.logits is not None
        assert same_bits(output.logits, want[list(lengths)])


@pytest.mark.parametrize("company", [1, 4, 7])
def test_company_changes_no_bit(company: int) -> None:
    """The same request alone and among others, in other slots and on other pages."""
    tokens = text(4, 150)
    others = [(text(10 + i, 20 + 13 * i), [7 + i] * 30) for i in range(company)]
    alone, alone_dump = drive([(tokens, [50, 50, 50])], seed=1)
    logits, dumps = drive([*others, (tokens, [1, 77, 10, 62])], seed=2)
    assert same_bits(logits[-1], alone[0])
    assert equal_dumps(dumps[-1], alone_dump[0])


def test_prompts_below_every_ratio() -> None:
    lengths = (1, 2, 3, 4, 5, 7, 8, 21, 127, 128, 129)
    logits, dumps = drive([(text(5)[:n], [n]) for n in lengths])
    want = twin_logits(PRESET, MODE, text(5)[:129])
    for n, got, dump in zip(lengths, logits, dumps, strict=True):
        assert bool(got.isfinite().all())
        assert same_bits(got, want[:n])
        assert dump["csa_kv"].shape[1] == n // 4
        assert dump["hca_kv"].shape[1] == n // 128


def test_a_missing_page_is_refused_before_anything_is_read() -> None:
    model = single_model(PRESET, MODE)
    caches = model.make_caches(CacheShape(1, CONTEXT, 8))
    with pytest.raises(ValueError, match="no mapped page"):
        model.plan([RequestRows(0, 0, [1], asked=(0,))], caches)
    with pytest.raises(ValueError, match="needs caches"):
        model.plan([RequestRows(0, 5, [1], asked=(0,))])
    with pytest.raises(ValueError, match="max_context"):
        caches.admit(0, CONTEXT + 1)
    caches.admit(0, 64)
    with pytest.raises(ValueError, match="taken"):
        caches.admit(0, 64)
    caches.release(0)
    caches.check_integrity()


def test_a_request_beyond_what_was_admitted_is_refused_not_clipped() -> None:
    model = single_model(PRESET, MODE)
    caches = model.make_caches(CacheShape(1, CONTEXT, 8))
    caches.admit(0, 64)
    model.plan([RequestRows(0, 56, text(1, 8), asked=(7,))], caches)
    with pytest.raises(ValueError, match="slot 0 comes to 65 positions, allowed: its limit 64"):
        model.plan([RequestRows(0, 64, text(1, 1), asked=(0,))], caches)


@pytest.fixture
def nan_workspaces() -> Iterator[None]:
    """Memory that nobody wrote is NaN, so that whoever reads beyond what a step gathered sees it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert bool(torch.empty(5).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@torch.no_grad()
def test_long_mixed_contexts_read_nothing_that_was_not_written(nan_workspaces: None) -> None:
    """4K to 8K positions side by side: raw and compressed lengths are never taken for each other."""
    config = replace(tiny(), max_position_embeddings=16384)
    model = Model(config, dict(random_weights(config, 7, FLOAT32)), Groups.single(), FLOAT32)
    lengths, last = (4096, 5120, 8192), 3
    prompts = [text(60 + i, n + last) for i, n in enumerate(lengths)]
    caches = model.make_caches(CacheShape(len(lengths), max(lengths) + last, 1024))
    poison(caches)
    permute_pages(caches, 1)
    for slot, prompt in enumerate(prompts):
        caches.admit(slot, len(prompt))
    for start in range(0, max(lengths), 1024):
        rows = [RequestRows(s, start, p[start : start + 1024]) for s, p in enumerate(prompts) if start < lengths[s]]
        model.forward(model.plan(rows, caches), caches)
    got = []
    for step in range(last):
        rows = [
            RequestRows(s, n + step, [prompts[s][n + step]], kind="decode", asked=(0,)) for s, n in enumerate(lengths)
        ]
        logits = model.forward(model.plan(rows, caches), caches).logits
        assert logits is not None and bool(logits.isfinite().all())
        got.append(logits)
    for slot, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        want = model.forward(model.plan([RequestRows(0, 0, prompt, asked=range(length, length + last))])).logits
        assert want is not None and same_bits(torch.stack(got)[:, slot], want)
