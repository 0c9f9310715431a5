"""The MTP layer behind a target: the tap of a real forward, and engines that draft with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from mtp_scene import text_of
from naive_mtp import naive_mtp
from naive_v4 import naive_forward
from rank_pool import RankPools

from meshspark.launch.engine import Engine
from meshspark.layouts.rows import RequestRows
from meshspark.models.checkpoint.share import RankWeights, shard_weights
from meshspark.models.checkpoint.synthetic import random_weights
from meshspark.models.dspark import mtp
from meshspark.models.dspark.draft import Drafts
from meshspark.models.dspark.mtp import MtpProposer, make_mtp
from meshspark.models.dspark.plan import DraftBlock
from meshspark.models.dspark.proposer import Anchors, KeptRows, Room
from meshspark.models.numerics import FLOAT64, numerics
from meshspark.models.request import SamplingParams
from meshspark.models.selfcheck import row_independence
from meshspark.models.v4.caches import poison
from meshspark.models.v4.config import tiny_mtp
from meshspark.models.v4.model import Model, Tap
from meshspark.models.v4.pools import CacheShape
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology


def test_a_target_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tap of a real forward, prompts in chunks, against two naive models; and not that of another layer."""
    check_target()
    monkeypatch.setattr(mtp, "mtp_tap", lambda config: Tap(config.num_hidden_layers - 2, "streams"))
    with pytest.raises(AssertionError):
        check_target()


def check_target() -> None:
    config, groups = tiny_mtp(), Groups.single()
    weights = random_weights(config, 7, FLOAT64, draft=True)
    model = Model(config, weights, groups, FLOAT64)
    proposer = MtpProposer(make_mtp(config, weights, model.embed, model.head, groups, FLOAT64))
    caches = model.make_caches(CacheShape(3, 64, 32, draft_stages=1))
    poison(caches)
    caches.admit(2, 64)
    tokens, start = text_of(9), 0
    for count in (5, 17, 1):
        with torch.no_grad():
            plan = model.plan([RequestRows(2, start, tokens[start : start + count], asked=(count - 1,))], caches)
            taps = model.forward(plan, caches, proposer.taps).taps
            position = np.arange(start, start + count)
            same = [np.full(count, number) for number in (2, caches.generation(2))]
            after = np.array(tokens[start + 1 : start + count + 1])
            proposer.keep(KeptRows(*same, position, after), taps, caches)
            start += count
            block = DraftBlock(2, start, tokens[start])
            anchors = Anchors([block], [count - 1], taps, Room((1,), 1))
            got = proposer.propose(anchors, caches, keep_logits=True)
        caches.commit(2, tokens, start)
    streams = naive_forward(config, dict(weights), tokens[:start]).streams[-1]
    want = naive_mtp(config, dict(weights), streams, tokens[: start + 1])
    assert got.logits is not None
    torch.testing.assert_close(got.logits[0, 0], want.logits[-1], rtol=0, atol=1e-9)


PROMPTS = ([5, 6, 7], [9], [4, 4, 8, 100, 3] * 9, [77] * 20)
NEW = 12
LOST = 200
"""A token whose embedding is not finite in `engine_of`."""


@dataclass(frozen=True)
class Noting(MtpProposer):
    """Notes what the layer drafts, and puts the right token in its place where the anchor's position is even."""

    known: dict[int, list[int]]
    seen: dict[tuple[int, int], int] = field(default_factory=dict)
    odds: dict[int, float] = field(default_factory=dict)

    def propose(self, anchors: Anchors, *args: Any, **kwargs: Any) -> Drafts:
        got = super().propose(anchors, *args, **kwargs)
        ids = got.ids.clone()
        for number, block in enumerate(anchors.blocks):
            self.seen[block.slot, block.position] = int(ids[number, 0])
            self.odds[block.position] = float(got.confidence[number, 0])
            text = self.known.get(block.slot, [])
            if block.position % 2 == 0 and block.position + 1 < len(text):
                ids[number] = text[block.position + 1]
        return replace(got, ids=ids)


@cache
def weights_of(mode: str) -> RankWeights:
    weights = random_weights(tiny_mtp(), 7, numerics(mode), draft=True)
    weights["embed.weight"][LOST] = float("nan")
    return weights


def slot_of(number: int, tp: int) -> int:
    """Where a request sits, as seats are given."""
    return number % tp * -(-len(PROMPTS) // tp) + number // tp


def engine_of(
    groups: Groups,
    mode: str,
    known: Sequence[Sequence[int]] | None = None,
    max_context: int = 96,
    prefill_rows: int = 16,
) -> Engine:
    """An engine without drafts, or one whose drafts are noted, and right at even positions where texts are known."""
    config, form = tiny_mtp(), numerics(mode)
    weights = shard_weights(weights_of(mode), groups.topology, groups.rank, config, draft=True)
    model = Model(config, weights, groups, form)
    proposer = None
    if known is not None:
        tp = groups.topology.tp
        texts = {slot_of(n, tp): [*prompt, *ids] for n, (prompt, ids) in enumerate(zip(PROMPTS, known, strict=False))}
        layer = make_mtp(config, weights, model.embed, model.head, groups, form)
        proposer = Noting(layer, texts)
    return Engine(model, requests=len(PROMPTS), max_context=max_context, prefill_rows=prefill_rows, proposer=proposer)


def written(engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    """What the prompts become, on world rank 0; other ranks serve."""
    if not engine.is_front:
        engine.serve()
        return []
    numbers = [engine.add_request(prompt, SamplingParams(NEW)) for prompt in prompts]
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.active:
        for event in engine.step():
            ids[event.request_id] += event.token_ids
            if event.finish_reason == "error":
                ids[event.request_id].append(-1)
        engine.caches.check_integrity()
    engine.close()
    return [ids[number] for number in numbers]


def noted(engine: Engine) -> dict[tuple[int, int], int]:
    proposer = engine.decoder.proposer
    assert isinstance(proposer, Noting)
    return proposer.seen


@cache
def plain(mode: str) -> list[list[int]]:
    return written(engine_of(Groups.single(), mode))


def test_an_engine_drafts_what_the_naive_layer_does() -> None:
    """Prompts in chunks, one of a single token; rejected and accepted drafts. Nothing that is written changes."""
    engine = engine_of(Groups.single(), "float64", plain("float64"))
    assert written(engine) == plain("float64")
    counts = engine.metrics()["drafts"]
    assert counts["verified"] > counts["accepted"] > 10
    weights, seen = dict(weights_of("float64")), noted(engine)
    for slot, (prompt, ids) in enumerate(zip(PROMPTS, plain("float64"), strict=True)):
        text = [*prompt, *ids]
        streams = naive_forward(tiny_mtp(), weights, text[:-1]).streams[-1]
        want = naive_mtp(tiny_mtp(), weights, streams, text).logits.argmax(1).tolist()
        got = {position: draft for (at, position), draft in seen.items() if at == slot}
        assert got == {position: want[position - 1] for position in got}
        assert {len(prompt), len(prompt) + 1} & set(got) and len(got) > NEW // 3


def test_a_request_that_fails_ends_alone() -> None:
    """Its last row has no next token, and so no key; the others draft on."""
    prompts = [*PROMPTS[:2], [6, LOST, 8], PROMPTS[3]]
    engine = engine_of(Groups.single(), "float32", [])
    got = written(engine, prompts)
    want = plain("float32")
    assert got == [want[0], want[1], [-1], want[3]]
    assert {slot for slot, _ in noted(engine)} == {0, 1, 3}


def test_a_prefix_hit_drafts_as_a_cold_run() -> None:
    """Sequences that part right behind 128 shared tokens: the last key there depends on the first that differs."""
    text = [2 + token % 198 for token in text_of(4)]
    first, second = ([*text[:128], token, *text[129:140]] for token in (150, 60))
    later = [*second[:135], 7]

    def odds(*prompts: list[int]) -> tuple[list[dict[int, float]], int]:
        """Of the drafts of each prompt by position, one run after the other in one engine; and the hits."""
        engine, found = engine_of(Groups.single(), "float64", [], max_context=160, prefill_rows=64), []
        proposer = engine.decoder.proposer
        assert isinstance(proposer, Noting)
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(6))
            while engine.active:
                engine.step()
                engine.caches.check_integrity()
            found.append(dict(proposer.odds))
            proposer.odds.clear()
        return found, engine.metrics()["prefix"]["hits"]

    found, hits = odds(first, second, later)
    assert hits == 1, "the second shares all tokens of a point with the first, but not its last key"
    for number, prompt in ((1, second), (2, later)):
        (cold,), _ = odds(prompt)
        assert found[number] == pytest.approx(cold, rel=0, abs=1e-9) and len(cold) >= 3


def on_ranks(groups: Groups, known: list[list[int]]) -> dict[str, Any]:
    engine = engine_of(groups, "float32", known)
    ids = written(engine)
    return {"ids": ids, "seen": [[*place, draft] for place, draft in noted(engine).items()]}


def test_engines_on_ranks_draft_as_one(ranks: RankPools) -> None:
    if not row_independence(tiny_mtp(), (numerics("float32"),))["holds"]:
        pytest.skip("this machine's products depend on the row count")
    twin = engine_of(Groups.single(), "float32", plain("float32"))
    assert written(twin) == plain("float32")
    want = {(slot_of(slot, 2), position): draft for (slot, position), draft in noted(twin).items()}
    results = ranks.run(Topology(2, 2, 2), "test_mtp_engine:on_ranks", timeout=100, known=plain("float32"))
    assert results[0]["ids"] == plain("float32")
    seen = [{(slot, position): draft for slot, position, draft in result["seen"]} for result in results]
    assert not seen[0].keys() & seen[1].keys()
    assert seen[0] | seen[1] == want
