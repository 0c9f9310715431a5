"""Engines that draft, watched step by step: what they write and keep is compared with serial decoding.

Serial decoding is the same engine with the same proposer for a request that does not take part (`draft=False`): rows of
context are kept, nothing is drafted. All greedy prompts are beginnings of two texts that the target wrote itself, so
one run of each text is the oracle of every prompt: after n tokens it writes the text from n on.

A greedy request's seed, which greedy decoding does not use, says what is drafted for it: `natural`, `right`, `wrong`,
or from `FORCED` on how many drafts of its first block are right.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from episodes import permute_pages
from safetensors.torch import load_file, save_file
from test_verify import restore

from meshspark.benchmarks.oracle import OracleProposer
from meshspark.launch.engine import Engine
from meshspark.launch.requests import Request
from meshspark.layouts.bits import same_bits
from meshspark.layouts.rows import RequestRows
from meshspark.models.checkpoint.share import shard_weights
from meshspark.models.checkpoint.synthetic import random_weights
from meshspark.models.dspark.draft import Choose, Drafts, choose_greedy
from meshspark.models.dspark.drafter import make_drafter
from meshspark.models.dspark.proposer import Anchors, Beside, DSparkProposer, Proposer
from meshspark.models.dspark.shape import DraftShape
from meshspark.models.numerics import numerics
from meshspark.models.request import RequestState, SamplingParams
from meshspark.models.v4.caches import Caches, poison
from meshspark.models.v4.config import tiny_dspark
from meshspark.models.v4.model import Model
from meshspark.parallel.groups import Groups

TEXTS = (5, 100)
"""First tokens of the texts, by which a prompt tells which one it is of."""
LENGTH = 168
CONTEXT = 256
BLOCK = 4
"""Positions of a window page: small, so that rings wrap within the texts."""
NATURAL, RIGHT, WRONG, FORCED = 0, 1, 2, 10
DIFFERENCE = 1e-10


@cache
def whole_weights(mode: str) -> Mapping[str, torch.Tensor]:
    return random_weights(tiny_dspark(), 7, numerics(mode), draft=True)


@cache
def rank_model(mode: str, groups: Groups) -> tuple[Model, Mapping[str, torch.Tensor]]:
    """A rank's share of the random tiny-dspark, target and weights."""
    config = tiny_dspark()
    weights = shard_weights(whole_weights(mode), groups.topology, groups.rank, config, draft=True)
    return Model(config, weights, groups, numerics(mode)), weights


@cache
def single() -> Groups:
    return Groups.single()


def real_proposer(mode: str, gamma: int = 5, groups: Groups | None = None) -> DSparkProposer:
    """The DSpark drafter of random weights; also of more drafts than a block of its checkpoint has."""
    groups = single() if groups is None else groups
    model, weights = rank_model(mode, groups)
    shape = DraftShape(gamma, max(gamma, 5), 16)
    drafter = make_drafter(model.config, weights, model.embed, model.head, groups, numerics(mode), shape=shape)
    return DSparkProposer(drafter)


class Watched(Engine):
    """An engine that is looked at between what it learns of the last step and what it runs next.

    What pools hold before is noise, another on every rank. start: rows that a prompt's caches are filled with, all but
    its last token's, instead of running them.
    """

    def __init__(
        self,
        model: Model,
        *,
        look: Callable[["Watched"], None] | None = None,
        start: Callable[[Request], Mapping[str, torch.Tensor]] | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **{"max_context": CONTEXT, "block_size": BLOCK, "prefill_rows": 16, **kwargs})
        self.look, self.start = look, start
        self.noise = float("nan") if self.groups.rank % 2 == 0 else 1e3 + seed
        permute_pages(self.caches, seed)
        poison(self.caches, self.noise)

    def _rows(self) -> list[tuple[RequestState, RequestRows]]:
        if self.look is not None:
            self.look(self)
        return super()._rows()

    def _admit(self, new: Request) -> None:
        super()._admit(new)
        length = len(new.prompt) - 1
        if self.start is not None and length and new.dp_rank == self.place.dp_rank:
            restore(self.caches, new.slot, length, dict(self.start(new)))
            new.computed = length

    @property
    def mine(self) -> list[Request]:
        return self._mine()

    def request_of(self, slot: int) -> Request:
        """Who has a slot of this rank's group."""
        return self._by_seat[self.place.dp_rank, slot]


@dataclass(frozen=True)
class Serial:
    """A text as the target writes it one token at a time, and dumps of its caches by committed length."""

    tokens: list[int]
    dumps: list[dict[str, torch.Tensor]]


Texts = Mapping[int, Serial]
"""By first token."""


@cache
def serial(mode: str) -> Texts:
    """All texts, written side by side."""
    dumps: list[list[dict[str, torch.Tensor]]] = [[{}] for _ in TEXTS]

    def look(engine: Watched) -> None:
        for request in engine.mine:
            own = dumps[request.request_id]
            if request.computed == len(own):
                own.append(engine.caches.dump(request.slot, request.computed))

    model = rank_model(mode, single())[0]
    engine = Watched(model, look=look, requests=len(TEXTS), prefix_points=0, proposer=real_proposer(mode))
    params = SamplingParams(LENGTH - 1, draft=False)
    results = serve(engine, [Call([first], params) for first in TEXTS])
    assert all(len(ids) == LENGTH - 1 for ids, _ in results) and all(len(own) == LENGTH - 1 for own in dumps)
    return {first: Serial([first, *results[i][0]], dumps[i]) for i, first in enumerate(TEXTS)}


def save_texts(texts: Texts, path: Path) -> None:
    """For ranks, which then need not write the texts themselves."""
    tensors = {}
    for first, text in texts.items():
        tensors[f"{first}.tokens"] = torch.tensor(text.tokens)
        for length, dump in enumerate(text.dumps):
            tensors |= {f"{first}.{length}.{name}": rows.contiguous() for name, rows in dump.items()}
    save_file(tensors, path)


@cache
def load_texts(path: str) -> Texts:
    texts = {first: Serial([], [{} for _ in range(LENGTH - 1)]) for first in TEXTS}
    for key, rows in load_file(path).items():
        first, what, *name = key.split(".")
        if name:
            texts[int(first)].dumps[int(what)][name[0]] = rows
        else:
            texts[int(first)].tokens.extend(rows.tolist())
    return texts


@dataclass(frozen=True)
class Call:
    """A request of the traffic: the step of its arrival, and after how many tokens it is cancelled (0: never)."""

    prompt: list[int]
    params: SamplingParams
    step: int = 0
    cancel_after: int = 0


def text_call(text: Serial, start: int, new: int, drafts: int, **fields: Any) -> Call:
    """A greedy request that goes on with a text after `start` tokens."""
    own = {name: fields.pop(name) for name in ("step", "cancel_after") if name in fields}
    return Call(text.tokens[:start], SamplingParams(new, seed=drafts, **fields), **own)


def wanted(text: Serial, call: Call) -> list:
    """What serial decoding gives a request that goes on with a text: [ids, reason]."""
    start = len(call.prompt)
    assert start + call.params.max_new_tokens <= LENGTH
    return [text.tokens[start : start + call.params.max_new_tokens], "length"]


def serve(engine: Engine, calls: Sequence[Call]) -> list[list]:
    """All requests to their ends on world rank 0 -> [ids, reason] of each, in order."""
    results: list[list] = [[[], None] for _ in calls]
    numbers: dict[int, int] = {}
    step = 0
    while step <= max(call.step for call in calls) or engine.active:
        for place, call in enumerate(calls):
            if call.step == step:
                numbers[engine.add_request(call.prompt, call.params)] = place
        step += 1
        for event in engine.step() if engine.active else ():
            place = numbers[event.request_id]
            results[place][0] += event.token_ids
            results[place][1] = event.finish_reason or results[place][1]
            cancel = calls[place].cancel_after
            if cancel and len(results[place][0]) >= cancel and event.finish_reason is None:
                engine.cancel(event.request_id)
    engine.caches.check_integrity()
    return results


class Known(Mapping[int, Sequence[int]]):
    """What the requests of an engine will write, by slot: their texts, or by number what else is given."""

    def __init__(self, texts: Texts, others: Mapping[int, Sequence[int]] | None = None) -> None:
        self._texts, self._others = texts, {} if others is None else others
        self.engine: Watched | None = None

    def _request(self, slot: int) -> Request:
        # An engine that times its steps when it is made has no requests.
        if self.engine is None:
            raise KeyError(slot)
        return self.engine.request_of(slot)

    def __getitem__(self, slot: int) -> Sequence[int]:
        request = self._request(slot)
        if request.request_id in self._others:
            return self._others[request.request_id]
        return self._texts[request.prompt[0]].tokens

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def right(self, slot: int, anchor: int, number: int) -> bool | None:
        """As the request's seed says. Where drafts of a block are right up to one, those behind it are right again."""
        if self.engine is None:
            return None
        request = self._request(slot)
        kind = request.params.seed
        if kind in (NATURAL, RIGHT, WRONG):
            return {NATURAL: None, RIGHT: True, WRONG: False}[kind]
        first = kind - FORCED
        later = (anchor * 7 + first) % (self.engine.decoder.gamma + 1)
        return number != (first if anchor == len(request.prompt) else later)


def oracle(mode: str, gamma: int, known: Known, groups: Groups | None = None, *, inner: bool = True) -> OracleProposer:
    """Drafts of what is known as requests' seeds say, over the context rows of the real drafter."""
    beside = real_proposer(mode, gamma, groups) if inner else None
    chance = None if inner else 0.5
    return OracleProposer(gamma, known, known.right, tiny_dspark().vocab_size, chance, inner=beside)


def watched(mode: str, proposer: Proposer | None, groups: Groups | None = None, **kwargs: Any) -> Watched:
    """A watched engine of the random model, which an oracle then knows."""
    engine = Watched(rank_model(mode, single() if groups is None else groups)[0], proposer=proposer, **kwargs)
    if isinstance(proposer, Recorder):
        proposer.engine, proposer = engine, proposer.inner
    if isinstance(proposer, OracleProposer) and isinstance(proposer.known, Known):
        proposer.known.engine = engine
    return engine


def from_text(texts: Texts) -> Callable[[Request], Mapping[str, torch.Tensor]]:
    """`start` of a watched engine: prompts begin with the rows that serial decoding left."""
    return lambda request: texts[request.prompt[0]].dumps[len(request.prompt) - 1]


def spoil(engine: Watched) -> None:
    """Fill what nobody may read with noise: free pages, and rows behind a request's committed length, rejected ones
    among them."""
    caches = engine.caches
    for family in caches.families:
        pool, table = caches.pools[family.name], caches.tables[family.name]
        noise = engine.noise if pool.is_floating_point() else -1
        pool.unflatten(1, (-1, family.page))[:, caches.pages[family.name].free] = noise
        for request in engine.mine:
            end = caches._held[request.slot].mapped[family.name][1] * family.page
            index = torch.arange(family.rows(request.computed), max(end, family.rows(request.computed)))
            slots = table.slots(torch.tensor(request.slot), index)
            pool[:, slots[slots >= 0]] = noise


@dataclass
class Watch:
    """Looks at an engine at every step: pages, caches of the requests that write a text, and the table of requests.

    fault is the first thing that is not as serial decoding has it. table: per step, of every request that runs in the
    world, [number, tokens known, drafts, survivals]; alike on all ranks. places: per step, slots in order of arrival.
    """

    mode: str
    texts: Texts = field(default_factory=dict)
    fault: str = ""
    table: list[list] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)

    def __call__(self, engine: Watched) -> None:
        engine.caches.check_integrity()
        for request in engine.mine:
            assert request.num_generated or not request.drafts, "drafts of who had the slot before"
            if engine.caches.shape.draft_stages:
                assert engine.caches.context_Q[request.slot] == request.computed, "context rows are those of final rows"
        for request in engine.mine if self.texts else ():
            self.fault = self.fault or self._differs(engine.caches, request)
        spoil(engine)
        requests = engine.requests.values()
        self.table.append([[r.request_id, len(r.tokens), list(r.drafts), list(r.survivals)] for r in requests])
        self.places.append([request.slot for request in engine.mine])

    def _differs(self, caches: Caches, request: Request) -> str:
        text = self.texts.get(request.prompt[0])
        if text is None or not 0 < request.computed < len(text.dumps):
            return ""
        for name, rows in caches.dump(request.slot, request.computed).items():
            if not agree(rows, text.dumps[request.computed][name], self.mode):
                return (
                    f"{name} of {len(request.prompt)} prompt tokens at {request.computed}, drafts {request.params.seed}"
                )
        return ""


def agree(got: torch.Tensor, want: torch.Tensor, mode: str) -> bool:
    """Equal up to rounding in FP64, equal bits elsewhere."""
    if mode == "float64":
        return got.shape == want.shape and (got.numel() == 0 or bool((got - want).abs().max() <= DIFFERENCE))
    return same_bits(got, want)


@dataclass
class Recorder(Beside):
    """A proposer that remembers what it drafted, by request and position of the anchor: ids and confidences, and the
    anchor's token."""

    engine: Watched | None = None
    anchors: dict[tuple[int, int], int] = field(default_factory=dict)
    drafted: dict[tuple[int, int], tuple[list[int], torch.Tensor]] = field(default_factory=dict)

    def propose(
        self, anchors: Anchors, caches: Caches, *, choose: Choose = choose_greedy, keep_logits: bool = False
    ) -> Drafts:
        got = super().propose(anchors, caches, choose=choose, keep_logits=keep_logits)
        for block, ids, confidence in zip(anchors.blocks, got.ids.tolist(), got.confidence, strict=True):
            assert self.engine is not None
            name = self.engine.request_of(block.slot).request_id, block.position
            assert name not in self.drafted, "an anchor is drafted for once"
            self.drafted[name], self.anchors[name] = (ids, confidence.clone()), block.token
        return got


def same_drafts(
    got: Mapping[tuple[int, int], tuple[list[int], torch.Tensor]],
    want: Mapping[tuple[int, int], tuple[list[int], torch.Tensor]],
    mode: str,
) -> str:
    """'' where all blocks are the same, else the first that is not."""
    if got.keys() != want.keys():
        return f"blocks {sorted(got.keys() ^ want.keys())[:5]} are only in one"
    for name, (ids, confidence) in want.items():
        if got[name][0] != ids:
            return f"ids of {name}: {got[name][0]}, not {ids}"
        if not agree(got[name][1], confidence, mode):
            return f"confidences of {name}"
    return ""
