"""S-row verification with forced acceptance: whatever was rejected, what follows equals serial decoding.

An episode starts from exactly the rows that a dump holds (everything else is NaN), verifies S rows of which the
first k are right and the rest garbage, commits k, and goes on with right rows.
"""

import itertools
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from episodes import make_model, permute_pages, single_model
from rank_pool import RankPools

from meshspark.layouts.bits import same_bits
from meshspark.layouts.rows import RequestRows
from meshspark.models.v4.caches import Caches, poison
from meshspark.models.v4.model import Model
from meshspark.models.v4.pools import CacheShape
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

WIDTHS = range(1, 10)
STARTS = (*range(16), *range(112, 144))
FOLLOW = 9
LENGTH = 143 + 9 + FOLLOW + 1
PRESET = "tiny"
CONTEXT = 256


@dataclass(frozen=True)
class Episode:
    start: int
    width: int
    accepted: int


ALL = [Episode(n, width, k) for n in STARTS for width in WIDTHS for k in range(1, width + 1)]


def pairwise() -> list[Episode]:
    """A sample in which every (start, width) and every (width, accepted) pair occurs."""
    sample = []
    for i, (start, width) in enumerate(itertools.product(STARTS, WIDTHS)):
        sample.append(Episode(start, width, 1 + (i // len(WIDTHS) + i) % width))
    return sample


def tokens(vocab: int) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(2, vocab, (LENGTH,), generator=generator).tolist()


@dataclass(frozen=True)
class Serial:
    """One token at a time on one rank: logits by position, dumps by length."""

    logits: torch.Tensor
    dumps: list[dict[str, torch.Tensor]]


@cache
def serial(mode: str) -> Serial:
    model = single_model(PRESET, mode)
    caches = model.make_caches(CacheShape(1, CONTEXT, 1))
    poison(caches)
    caches.admit(0, CONTEXT)
    logits, dumps = [], [caches.dump(0, 0)]
    with torch.no_grad():
        for position, token in enumerate(tokens(model.config.vocab_size)):
            rows = RequestRows(0, position, [token], kind="decode", asked=(0,))
            output = model.forward(model.plan([rows], caches), caches)
            assert output.logits is not None
            logits.append(output.logits[0])
            dumps.append(caches.dump(0, position + 1))
    return Serial(torch.stack(logits), dumps)


def restore(caches: Caches, slot: int, length: int, dump: dict[str, torch.Tensor]) -> None:
    """Write a dump's rows back where this request slot keeps them."""
    caches.map_resident(slot, length)
    for family in caches.families:
        rows = dump[family.name]
        last = length // family.ratio if family.per_entry and family.ratio else length
        index = torch.arange(last - rows.shape[1], last)
        slots = caches.tables[family.name].slots(torch.tensor(slot), index)
        caches.pools[family.name][:, slots] = rows


PACKED = 240
"""Episodes that share their steps: bounds the memory of one step."""


def play(model: Model, episodes: list[Episode], dumps: list[dict[str, torch.Tensor]], tp: int, seed: int) -> tuple:
    """Packs of episodes -> (episode, position, logits) of owned rows, and the dump that ends each episode."""
    rows, ends = [], []
    for first in range(0, len(episodes), PACKED):
        pack = episodes[first : first + PACKED]
        pack_rows, pack_ends = play_pack(model, pack, dumps, tp, seed + first)
        rows += [(first + index, position, logits) for index, position, logits in pack_rows]
        ends += pack_ends
    return rows, ends


def play_pack(model: Model, episodes: list[Episode], dumps: list[dict[str, torch.Tensor]], tp: int, seed: int) -> tuple:
    """Episodes as requests of the same two steps."""
    text, vocab = tokens(model.config.vocab_size), model.config.vocab_size
    caches = model.make_caches(CacheShape(max(1, len(episodes)), CONTEXT, max(WIDTHS)))
    poison(caches)
    permute_pages(caches, seed)
    for slot, episode in enumerate(episodes):
        caches.admit(slot, CONTEXT)
        restore(caches, slot, episode.start, dumps[episode.start])
    steps = []
    for slot, e in enumerate(episodes):
        right = text[e.start : e.start + e.accepted]
        garbage = [(token + 1 + i) % vocab for i, token in enumerate(text[e.start + e.accepted : e.start + e.width])]
        first = RequestRows(slot, e.start, right + garbage, slot % tp, "verify", range(e.accepted))
        after = e.start + e.accepted
        steps.append(
            (first, RequestRows(slot, after, text[after : after + FOLLOW], slot % tp, "verify", range(FOLLOW)))
        )
    rows = []
    for number in range(2):
        requests = [pair[number] for pair in steps]
        with torch.no_grad():
            output = model.forward(model.plan(requests, caches), caches)
        assert output.logits is not None
        for (index, offset), logits in zip(output.owned, output.logits, strict=True):
            rows.append((index, requests[index].start + offset, logits))
    caches.check_integrity()
    ends = [caches.dump(slot, e.start + e.accepted + FOLLOW) for slot, e in enumerate(episodes)]
    return rows, ends


def worst(mode: str, rows: list, ends: list, episodes: list[Episode], want: Serial) -> str:
    """'' where everything equals serial decoding, else the first thing that does not."""

    def equal(got: torch.Tensor, expected: torch.Tensor) -> bool:
        if mode == "float64":
            return got.numel() == 0 or bool((got - expected).abs().max() <= 1e-10)
        return same_bits(got, expected)

    for index, position, logits in rows:
        same_id = int(logits.argmax()) == int(want.logits[position].argmax())
        if not same_id or not equal(logits, want.logits[position]):
            return f"logits of position {position} in {episodes[index]}"
    for episode, dump in zip(episodes, ends, strict=True):
        for name, got in dump.items():
            if not equal(got, want.dumps[episode.start + episode.accepted + FOLLOW][name]):
                return f"{name} after {episode}"
    return ""


def test_every_start_width_and_acceptance() -> None:
    want = serial("float64")
    rows, ends = play(single_model(PRESET, "float64"), ALL, want.dumps, 1, 3)
    assert len(rows) == sum(e.accepted + FOLLOW for e in ALL)
    assert worst("float64", rows, ends, ALL, want) == ""


@pytest.mark.parametrize("mode", ["float32", "bfloat16"])
def test_bits(mode: str) -> None:
    episodes = pairwise()
    want = serial(mode)
    rows, ends = play(single_model(PRESET, mode), episodes, want.dumps, 1, 4)
    assert worst(mode, rows, ends, episodes, want) == ""


def test_a_wrong_row_is_seen() -> None:
    """The comparison can fail: one cached value that is off by 1e-6 shows."""
    want = serial("float64")
    changed = [{name: rows.clone() for name, rows in dump.items()} for dump in want.dumps]
    for dump in changed[8:]:
        dump["window_kv"][0, -1, 0] += 1e-6
    episodes = [Episode(8, 3, 2)]
    rows, ends = play(single_model(PRESET, "float64"), episodes, changed, 1, 0)
    assert worst("float64", rows, ends, episodes, want) != ""


def drive(groups: Groups, mode: str) -> str:
    """One rank's share of the pairwise sample: episodes are dealt to the dp groups in turn."""
    topology = groups.topology
    model = make_model(groups, PRESET, mode)
    dp_rank = topology.coordinates(groups.rank).dp_rank
    episodes = pairwise()[dp_rank :: 3 * topology.dp]
    want = serial(mode)
    rows, ends = play(model, episodes, want.dumps, topology.tp, groups.rank)
    return worst(mode, rows, ends, episodes, want)


@pytest.mark.parametrize("mode", ["float64", "float32"])
def test_on_four_ranks(ranks: RankPools, mode: str) -> None:
    assert ranks.run(Topology(4, 2, 4), "test_verify:drive", timeout=200, mode=mode) == [""] * 4


@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65, 127, 128, *range(151, 160)])
def test_rows_at_a_page_border_or_the_ceiling_stay_in_their_pages(length: int) -> None:
    """Eight rows behind any committed length, fewer at the ceiling; nobody else's page is written to."""
    ceiling, model = 160, single_model(PRESET, "float32")
    caches = model.make_caches(CacheShape(2, ceiling, 8))
    permute_pages(caches, length)
    poison(caches)
    caches.admit(1, ceiling)
    caches.map_resident(1, ceiling)
    other = {name: table.table[1][table.table[1] >= 0] for name, table in caches.tables.items()}
    for name, pool in caches.pools.items():
        pool.unflatten(1, (-1, caches.tables[name].page))[:, other[name]] = 7.0
    caches.admit(0, ceiling)
    restore(caches, 0, length, serial("float32").dumps[length])
    count = min(8, ceiling - length)
    text = tokens(model.config.vocab_size)[length : length + count]
    with torch.no_grad():
        logits = model.forward(
            model.plan([RequestRows(0, length, text, kind="verify", asked=range(count))], caches), caches
        )
    assert logits.logits is not None and same_bits(logits.logits, serial("float32").logits[length : length + count])
    for name, pool in caches.pools.items():
        family = next(f for f in caches.families if f.name == name)
        assert bool((pool.unflatten(1, (-1, family.page))[:, other[name]] == 7.0).all()), name
        if family.per_entry:
            assert caches.pages[name].used - len(other[name]) == -(-family.rows(length + count) // family.page)
    with pytest.raises(ValueError, match=f"comes to {ceiling + 1} positions, allowed: its limit {ceiling}"):
        model.plan([RequestRows(0, ceiling, [1])], caches)
