"""The MTP layer at test size with caches of its own. Streams of the target are noise by request and position, so that
any step can be made up."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from draft_scene import anchor_of, draft_weights, rank_share
from naive_mtp import NaiveMtp, naive_mtp

from meshspark.models.dspark.draft import Drafts
from meshspark.models.dspark.mtp import MtpLayer, MtpProposer, make_mtp, mtp_shape
from meshspark.models.dspark.plan import DraftBlock
from meshspark.models.dspark.proposer import Anchors, KeptRows, Room
from meshspark.models.matrix import held_matrix
from meshspark.models.numerics import numerics
from meshspark.models.v4.caches import Caches, poison
from meshspark.models.v4.config import V4Config, tiny_mtp
from meshspark.models.v4.model import Tap
from meshspark.models.v4.pools import DRAFT_FAMILY, CacheShape
from meshspark.parallel.groups import Groups

SLOTS = 8
TOKENS = 400


def mtp_config(window: int = 16) -> V4Config:
    return replace(tiny_mtp(), sliding_window=window)


def mtp_layer(groups: Groups, mode: str, config: V4Config | None = None, slab_blocks: int = 16) -> MtpLayer:
    """A rank's layer, of random weights."""
    config = mtp_config() if config is None else config
    share = rank_share(draft_weights(config, mode), config, groups)
    head = held_matrix(share, "head", numerics(mode))
    shape = mtp_shape(config, slab_blocks=slab_blocks)
    return make_mtp(config, share, share["embed.weight"], head, groups, numerics(mode), shape=shape)


@cache
def text_of(request: int) -> list[int]:
    return [anchor_of(request, position) for position in range(TOKENS)]


@cache
def streams_of(config: V4Config, request: int, position: int) -> torch.Tensor:
    """The target's streams [h, H] of a row, each of another size than the others."""
    generator = torch.Generator().manual_seed(1000 * request + position)
    noise = torch.randn(config.hc_mult, config.hidden_size, generator=generator)
    return noise * (1 + torch.arange(config.hc_mult))[:, None]


@cache
def naive_of(config: V4Config, request: int, length: int) -> NaiveMtp:
    """Rows 0 to length - 1 of a request; none of them depends on a later one."""
    streams = torch.stack([streams_of(config, request, position) for position in range(length)])
    return naive_mtp(config, dict(draft_weights(config, "float64")), streams, text_of(request)[: length + 1])


@dataclass(frozen=True)
class Row:
    """A row of a request; of one that is not kept the streams are another's."""

    request: int
    slot: int
    position: int
    kept: bool = True


@dataclass(frozen=True)
class Anchor:
    request: int
    slot: int
    position: int


class Scene:
    """One rank's proposer and its caches, whose pages come in a random order and hold NaN while nobody has them."""

    def __init__(
        self, layer: MtpLayer, seed: int, *, page: int = 4, fresh: int = 48, tokens: int = TOKENS, tp_rank: int = 0
    ) -> None:
        self.layer, self.proposer, self.tp_rank = layer, MtpProposer(layer), tp_rank
        shape = CacheShape(SLOTS, tokens, fresh, page, draft_stages=self.proposer.stages)
        self.caches = Caches(layer.config, shape, layer.numerics, layer.groups.topology)
        poison(self.caches)
        random.Random(seed).shuffle(self.caches.pages[DRAFT_FAMILY].free)

    def keep(self, bands: Sequence[Sequence[Row]]) -> torch.Tensor:
        """A step of these rows by tp_rank -> this rank's band of streams. Behind the rows comes padding."""
        last: dict[int, int] = {}
        for row in sorted((row for band in bands for row in band), key=lambda row: row.position):
            if row.slot not in self.caches._held:
                self.caches.admit(row.slot, TOKENS)
            self.caches.extend(row.slot, row.position, 1)
            last[row.slot] = max(last.get(row.slot, 0), row.position + 1 if row.kept else 0)
        band, T = bands[self.tp_rank], max(len(band) for band in bands) + 1
        slot, stamp, position, after = (np.full(T, fill) for fill in (0, 0, -1, -1))
        streams = torch.full((T, self.layer.config.hc_mult, self.layer.config.hidden_size), 3.0)
        for t, row in enumerate(band):
            slot[t], stamp[t] = row.slot, self.caches.generation(row.slot)
            streams[t] = streams_of(self.layer.config, row.request if row.kept else row.request + 500, row.position)
            if row.kept:
                position[t], after[t] = row.position, text_of(row.request)[row.position + 1]
        streams = streams.to(self.layer.numerics.stream)
        with torch.no_grad():
            self.proposer.keep(KeptRows(slot, stamp, position, after), self.taps(streams), self.caches)
        for number, end in last.items():
            self.caches.commit(number, [], end)
        self.caches.check_integrity()
        pool = self.caches.pools[DRAFT_FAMILY]
        for free in self.caches.pages[DRAFT_FAMILY].free:
            page = self.caches.tables[DRAFT_FAMILY].page
            pool[:, free * page : (free + 1) * page] = float("nan")
        return streams

    def taps(self, streams: torch.Tensor) -> dict[Tap, torch.Tensor]:
        (tap,) = self.proposer.taps
        return {tap: streams}

    def propose(
        self, anchors: Sequence[Anchor], streams: torch.Tensor, rows: Sequence[int], room: Room | None = None
    ) -> Drafts:
        """Drafts behind anchors, the rows before which stand there in the band."""
        blocks = [DraftBlock(a.slot, a.position, text_of(a.request)[a.position]) for a in anchors]
        room = Room((len(blocks),), len(blocks)) if room is None else room
        with torch.no_grad():
            return self.proposer.propose(Anchors(blocks, rows, self.taps(streams), room), self.caches, keep_logits=True)

    def context(self, slot: int, length: int) -> torch.Tensor:
        """The keys that are kept of the window before an anchor there."""
        return self.caches.dump(slot, length)[DRAFT_FAMILY][0]


def check_naive(scene: Scene, got: Drafts, number: int, anchor: Anchor, most: int) -> None:
    """One block's draft, and the keys before its anchor, are those of the naive layer over `most` rows."""
    length, config = anchor.position, scene.layer.config
    want = naive_of(config, anchor.request, most)
    assert got.logits is not None
    torch.testing.assert_close(got.logits[number, 0], want.logits[length - 1], rtol=0, atol=1e-10)
    assert got.ids[number].tolist() == [int(want.logits[length - 1].argmax())]
    kept = want.keys[max(0, length - config.sliding_window) : length]
    torch.testing.assert_close(scene.context(anchor.slot, length), kept, rtol=0, atol=1e-10)


def run_text(
    chunks: Sequence[int], window: int = 16, page: int = 4, mode: str = "float64", request: int = 3, slot: int = 5
) -> tuple[Scene, Drafts]:
    """A request's rows in steps of these lengths, in FP64 checked behind each -> the drafts behind the last."""
    scene = Scene(mtp_layer(Groups.single(), mode, mtp_config(window)), seed=sum(chunks), page=page, fresh=160)
    start, got = 0, None
    for count in chunks:
        rows = [Row(request, slot, position) for position in range(start, start + count)]
        # Out of order: a band of prompt rows need not be in the order of positions.
        random.Random(start).shuffle(rows)
        start += count
        anchor = Anchor(request, slot, start)
        before = next(t for t, row in enumerate(rows) if row.position == start - 1)
        streams = scene.keep([rows])
        got = scene.propose([anchor], streams, [before])
        if mode == "float64":
            check_naive(scene, got, 0, anchor, sum(chunks))
    assert got is not None
    return scene, got
