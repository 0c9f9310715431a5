"""Long contexts: working memory as its function says, limits that change no bit, the ceiling, and the benchmark."""

import json
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshspark.benchmarks import context_probe, context_steps
from meshspark.benchmarks.context_probe import fill_resident
from meshspark.launch import cli
from meshspark.launch.generate import SAMPLE
from meshspark.launch.tokenizer import TextTokenizer
from meshspark.layouts import tiles
from meshspark.layouts.bits import same_bits
from meshspark.layouts.entry_lanes import make_entry_lanes
from meshspark.layouts.lanes import FreshSpan
from meshspark.layouts.pages import PageTable, page_families
from meshspark.layouts.rowplan import Geometry, plan_rows
from meshspark.layouts.rows import RequestRows
from meshspark.models.checkpoint.loader import load_weights
from meshspark.models.numerics import BFLOAT16, FLOAT32, FLOAT64
from meshspark.models.v4 import attention, indexer
from meshspark.models.v4.attention import IndexInputs, KeySource, attend, attention_workspace
from meshspark.models.v4.caches import Caches, poison
from meshspark.models.v4.config import V4Config, flash, pro, tiny
from meshspark.models.v4.indexer import select, selected_entries
from meshspark.models.v4.model import Model
from meshspark.models.v4.pools import CacheShape
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

CEILING = 1 << 20
CHUNK = 256


class Held(TorchDispatchMode):
    """Bytes of the tensors made under it: those that are alive, their most, and the largest one."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, torch.Tensor):
                self._known.add(given.untyped_storage()._cdata)
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in self._known:
                self._take(made.untyped_storage())
        return result

    def _take(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        self._known.add(key)
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._give, key, size)

    def _give(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def wide_tiny(positions: int = 1 << 16) -> V4Config:
    return replace(tiny(), max_position_embeddings=positions)


class Stage:
    """Attention of the last `rows` positions below `context`, over filled caches of one request."""

    def __init__(self, config: V4Config, context: int, rows: int, ratio: int, mode: Any = FLOAT32) -> None:
        draw = torch.Generator().manual_seed(context + ratio)
        caches = Caches(config, CacheShape(1, context, rows), mode, Topology())
        caches.admit(0, context)
        start = context - rows
        fill_resident(caches, 0, start, 5)
        caches.extend(0, start, rows)
        geometry = Geometry(config.sliding_window, tuple(sorted(set(config.compress_ratios))), config.index_topk)
        plan = plan_rows(
            [RequestRows(0, start, [0] * rows)], geometry, tables=caches.tables, families=caches.layer_families
        )
        wide = mode.accumulation
        fresh = len(plan.boundaries[ratio].start_E)
        family = {4: "csa_kv", 128: "hca_kv"}[ratio]

        def source(name: str, rows: int, columns: int) -> KeySource:
            pool = caches.pool(name, 0)
            return KeySource(name, torch.randn(rows, columns, generator=draw).to(mode.kv), pool)

        heads, topk = config.index_n_heads, config.index_topk
        q_TID = torch.randn(rows, heads, config.index_head_dim, generator=draw).to(wide)
        head_TI = torch.randn(rows, heads, generator=draw).to(wide)
        index = None
        if ratio == 4:
            index = IndexInputs(q_TID, head_TI, source("csa_index", fresh, config.index_head_dim), topk)
        q_TAD = torch.randn(rows, config.num_attention_heads, config.head_dim, generator=draw).to(wide)
        self.arguments = (
            q_TAD,
            source("window_kv", rows, config.head_dim),
            source(family, fresh, config.head_dim),
            index,
            torch.randn(config.num_attention_heads, generator=draw).to(wide),
            plan.tiles[ratio],
            caches.lookup(torch.device("cpu")),
        )

    @torch.no_grad()
    def run(self) -> torch.Tensor:
        return attend(*self.arguments)


@pytest.mark.parametrize("ratio", [4, 128])
def test_memory_of_attention_is_what_its_function_says(ratio: int) -> None:
    config = replace(wide_tiny(), compress_ratios=(0, ratio), num_hidden_layers=2)
    for context in (8 << 10, 32 << 10):
        stage = Stage(config, context, CHUNK, ratio)
        with Held() as held:
            stage.run()
        said = attention_workspace(config, FLOAT32, CHUNK, context, requests=1)
        assert said / 3 < held.peak <= said <= attention_workspace(config, FLOAT32, CHUNK, context)


@pytest.mark.parametrize("ratio", [4, 128])
def test_limits_are_kept_and_change_no_bit(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits small enough for a tiny model: memory is flat in the context, and every row has its bits."""
    config, contexts, peaks = wide_tiny(), (8 << 10, 32 << 10), []
    wanted = [Stage(config, context, CHUNK, ratio).run() for context in contexts]
    monkeypatch.setattr(tiles, "MOST_KEYS", 1 << 9)
    monkeypatch.setattr(tiles, "MOST_ROW_LANES", 1 << 11)
    monkeypatch.setattr(tiles, "MOST_SCORES", 1 << 13)
    monkeypatch.setattr(tiles, "SCORE_LANES", 64)
    monkeypatch.setattr(indexer, "SCORE_LANES", 64)
    monkeypatch.setattr(indexer, "SELECT_ELEMENTS", 1 << 13)
    monkeypatch.setattr(attention, "MOST_ELEMENTS", 1 << 13)
    for context, want in zip(contexts, wanted, strict=True):
        stage = Stage(config, context, CHUNK, ratio)
        with Held() as held:
            got = stage.run()
        assert same_bits(got, want)
        peaks.append(held.peak)
    # One tile keeps the scores of all its entries (FP32 and masks) and the keys of a wide dense tile, in both dtypes.
    entries = (contexts[1] - contexts[0]) // ratio
    grown = entries * (64 * (4 + 3) if ratio == 4 else 64 + 8 * config.head_dim)
    assert peaks[1] - peaks[0] <= 1.1 * grown, peaks


def test_the_largest_tensor_at_the_deployment_point() -> None:
    """Of pure numbers: no batch that Flash makes has more key rows, scores or pairs of row and lane than the limits."""
    config = flash()
    for ratio in (0, 4, 128):
        for block in {0, 1, 31, 127, 128, 2047, CEILING // 64 - 1}:
            width = tiles.entry_width(block, ratio) if ratio else 0
            for rows in (1, 2, 4, 8, 16, 32, 64):
                count = tiles.most_tiles(rows, width, ratio, config.sliding_window, config.index_topk)
                gathered = tiles.is_gathered(width, ratio, config.index_topk)
                own = config.index_topk if gathered else 0
                lanes = 192 + (0 if gathered else width)
                parts = attention.row_parts(count, rows, 64, 512, lanes, own)
                taken = count * max(part.stop - part.start for part in parts)
                assert taken * 64 * (lanes + own) <= 1 << 24 and taken * own * 512 <= 1 << 24
                assert count * lanes * 512 <= 1 << 24
                if ratio == 4 and width > config.index_topk:
                    assert count * rows * width <= 1 << 24
                    assert count * rows * config.index_n_heads * min(width, tiles.SCORE_LANES) <= 1 << 24


def test_workspace_stops_growing() -> None:
    for config in (flash(), pro()):
        said = [attention_workspace(config, BFLOAT16, 512, context) for context in (1 << 16, 1 << 18, CEILING)]
        assert said[0] == said[1] == said[2] < 1200 << 20
        whole = attention_workspace(config, BFLOAT16, 1 << 15, CEILING)
        output = (1 << 15) * config.num_attention_heads * config.head_dim * 4
        assert whole == max(5 * output, whole) and whole < 5 * output + (1 << 30)
    assert attention_workspace(flash(), FLOAT64, 64, CEILING) > attention_workspace(flash(), BFLOAT16, 64, CEILING)
    with pytest.raises(ValueError, match="rows is 0"):
        attention_workspace(flash(), FLOAT32, 0, 1)


def test_selection_of_a_wide_row() -> None:
    """Ties across a million scores, in passes of few rows, still go to the lowest index."""
    width, count = 1 << 18, 512
    scores = torch.zeros(1, 40, width)
    scores[0, :, width - 1] = 1.0
    admitted = torch.arange(width) < torch.arange(width - 39, width + 1)[None, :, None]
    with Held() as held:
        chosen = selected_entries(select(scores, admitted, count), count)
    assert held.largest <= max(scores.numel(), 4 * indexer.SELECT_ELEMENTS) < 8 * scores.numel()
    assert torch.equal(chosen[0, :-1], torch.arange(count).expand(39, count))
    assert chosen[0, -1].tolist() == [*range(count - 1), width - 1]


def test_entry_lanes_are_those_of_the_entries() -> None:
    """Any part of the lanes, over permuted pages with NaN wherever nothing is to be read."""
    draw = torch.Generator().manual_seed(0)
    page, width, first, known = 32, 256, torch.tensor([0, 70, 128, 200]), torch.tensor([9, 70, 131, 256])
    table = torch.randperm(40, generator=draw)[:32].view(4, 8)
    pool = torch.full((40 * page, 3), float("nan"))
    rows = torch.randn(4, width, 3, generator=draw)
    for tile in range(4):
        for e in range(int(first[tile])):
            pool[table[tile, e // page] * page + e % page] = rows[tile, e]
    count = known - first
    fresh = torch.cat([rows[tile, first[tile] : known[tile]] for tile in range(4)])
    span = FreshSpan(torch.arange(4), first, count.cumsum(0) - count)
    lanes = make_entry_lanes(width, known, span, {"csa_kv": PageTable(page, table)}, ("csa_kv",))
    want = torch.where(torch.arange(width)[None, :, None] < known[:, None, None], rows, 0.0)
    assert torch.equal(lanes.fill(fresh, pool, "csa_kv"), want)
    for start, end in ((0, 64), (31, 33), (64, 256), (96, 131), (250, 256)):
        assert torch.equal(lanes.fill(fresh, pool, "csa_kv", start, end), want[:, start:end])
    table[2, 3] = -1
    with pytest.raises(ValueError, match="index 96 of request slot 2"):
        make_entry_lanes(width, known.clamp(min=128), span, {"csa_kv": PageTable(page, table)}, ("csa_kv",))


@pytest.mark.parametrize("start", [1_048_570, 1_048_572, 1_048_448])
def test_plan_at_the_ceiling(start: int) -> None:
    """Slots, widths and visible counts in 64 bit, with pages far beyond what 32 bit of elements reach."""
    config, far = flash(), 1 << 40
    families = page_families(config.sliding_window, config.compress_ratios)
    tables = {}
    for family in families:
        depth = family.depth(CEILING, 128)
        tables[family.name] = PageTable(family.page, far + torch.arange(depth).flip(0)[None])
    geometry = Geometry(config.sliding_window, (0, 4, 128), config.index_topk)
    rows = range(start, CEILING)
    plan = plan_rows([RequestRows(0, start, [0] * len(rows))], geometry, tables=tables, families=families)
    for ratio in (4, 128):
        seen = {}
        for batch in plan.tiles[ratio].batches:
            assert batch.entries is not None and batch.entries.width == CEILING // ratio
            assert batch.entries.lanes.known == batch.entries.visible_NR.max()
            valid = batch.rows_NR >= 0
            seen |= dict(zip(batch.rows_NR[valid].tolist(), batch.entries.visible_NR[valid].tolist(), strict=True))
        assert [seen[t] for t in range(len(rows))] == [(p + 1) // ratio for p in rows]
    for family in families:
        _, slots = plan.writes[family.name]
        assert slots.dtype == torch.int64
        index = rows if not family.per_entry else range(family.rows(start), family.rows(CEILING))
        depth = tables[family.name].table.shape[1]
        assert slots.tolist() == [
            (far + depth - 1 - i // family.page % depth) * family.page + i % family.page for i in index
        ]
    assert plan.boundaries[4].start_E[-1] == 4 * 262_143 and plan.boundaries[128].start_E[-1] == 128 * 8_191


@torch.no_grad()
def bench(*given: str) -> int:
    numerics = () if "--numerics" in given else ("--numerics", "float32")
    return cli.main(["bench", "context", "--preset", "tiny", *numerics, *given])


def test_bench_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    told, drawn = tmp_path / "a.json", tmp_path / "a.png"
    assert bench("--contexts", "128,2K,4K", "--steps", "5", "--json", str(told), "--plot", str(drawn)) == 0
    shown = capsys.readouterr().out
    assert "most grows" in shown and "WRONG" not in shown
    data = json.loads(told.read_text())
    assert (data["schema"], data["benchmark"], data["numerics"]) == (1, "context", "float32")
    assert [row["context"] for row in data["rows"]] == [128, 2048, 4096]
    for row in data["rows"]:
        assert not row["faults"] and {probe["ratio"] for probe in row["probes"]} == {4, 128}
        assert all(not probe["missed"] and not probe["wrong"] for probe in row["probes"])
        assert context_steps.SELECTION in row["stages_ms"]
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_bench_with_index_keys_in_int8(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--contexts", "128,2K", "--steps", "5", "--numerics", "w8a8") == 0
    assert "WRONG" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--contexts 8K", "1 to 4,096"),
        ("--contexts 0", "--contexts"),
        ("--contexts 1Q", "--contexts"),
        ("--contexts 4 --steps 6", "not less than --steps 6"),
        ("--steps 0", "--steps is 0"),
        ("--plot /nowhere/x.png", "--plot is"),
        ("--ranks 2", "--ranks"),
        ("--numerics w8a9", "w8a9"),
    ],
)
def test_bench_flags(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*given.split()) == 2
    assert message in capsys.readouterr().err


def test_bench_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("meshspark.benchmarks.context.free_bytes", lambda: 1 << 30)
    assert cli.main(["bench", "context"]) == 2
    assert "free are 1,073,741,824" in capsys.readouterr().err


def _last_not_selected(original: Any) -> Any:
    def choose(scores: torch.Tensor, admitted: torch.Tensor, count: int) -> torch.Tensor:
        admitted = admitted.clone()
        admitted[..., int(admitted.sum(-1).max()) - 1] = False
        return original(scores, admitted, count)

    return choose


def _next_slot(original: Any) -> Any:
    return lambda self, *given: original(self, *given[:3], (given[3][0], given[3][1] ^ 1), *given[4:])


@pytest.mark.parametrize(
    ("where", "name", "fault", "says"),
    [
        (attention, "select", _last_not_selected, "missed=1"),
        (Caches, "write", _next_slot, "not written where its row belongs"),
        (context_probe, "attended", lambda f: lambda q, k, s: f(q, k, s - 1), "error="),
    ],
)
def test_bench_sees_faults(
    where: Any, name: str, fault: Any, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(where, name, fault(getattr(where, name)))
    assert bench("--contexts", "1K", "--steps", "2") == 1
    assert says in capsys.readouterr().out


def source_text(least: int) -> str:
    """Source of the Python standard library, at least so many characters."""
    parts: list[str] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        if sum(map(len, parts)) >= least:
            break
    return "\n".join(parts)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@torch.no_grad()
def test_a_real_prefill_of_32k_tokens_in_chunks_is_one_call() -> None:
    """The sample on real text: chunks of 512 through the caches, and all rows in one step."""
    length, last = 32 << 10, 3
    config, weights = load_weights(SAMPLE, Topology(), 0, FLOAT32)
    model = Model(config, dict(weights), Groups.single(), FLOAT32)
    ids = TextTokenizer.load(SAMPLE, config.vocab_size).encode(source_text(6 * length))[: length + last]
    assert len(ids) == length + last
    asked = range(255, 512, 256)
    caches = model.make_caches(CacheShape(1, length + last, 512))
    poison(caches)
    caches.admit(0, length + last)
    got = []
    for start in range(0, length, 512):
        plan = model.plan([RequestRows(0, start, ids[start : start + 512], asked=asked)], caches)
        got.append(model.forward(plan, caches).logits)
    for start in range(length, length + last):
        plan = model.plan([RequestRows(0, start, ids[start : start + 1], kind="decode", asked=(0,))], caches)
        got.append(model.forward(plan, caches).logits)
    assert all(logits is not None for logits in got)
    rows = [*range(255, length, 256), *range(length, length + last)]
    want = model.forward(model.plan([RequestRows(0, 0, ids, asked=rows)])).logits
    chunked = torch.cat([logits for logits in got if logits is not None])
    assert want is not None and torch.equal(chunked.argmax(1), want.argmax(1))
    assert same_bits(chunked, want)
