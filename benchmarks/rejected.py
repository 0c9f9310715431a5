"""A step whose drafts are all rejected, beside what it must consist of: the target at its rows, and the drafter."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..launch.engine import Engine
from ..launch.schedule import pick_rows
from ..layouts.rows import RequestRows
from ..models.checkpoint.synthetic import random_weights
from ..models.dspark.draft import Choose, Drafts, choose_greedy
from ..models.dspark.drafter import Drafter, make_drafter
from ..models.dspark.proposer import Anchors, Beside, DSparkProposer, KeptRows
from ..models.dspark.step import target
from ..models.request import RequestState, SamplingParams
from ..models.v4.caches import Caches
from ..models.v4.config import DSparkFields, V4Config
from ..models.v4.model import Model, Tap
from .drafted import GRACE

STAGES, BLOCK, MARKOV_RANK = 2, 5, 64


def with_random_drafter(model: Model, seed: int) -> Drafter:
    """A drafter of random weights for a model of such a config; of one rank."""
    config = model.config
    weights = random_weights(config, seed, model.numerics, draft=True)
    own = {name: weight for name, weight in weights.items() if name.startswith("mtp.")}
    return make_drafter(config, own, model.embed, model.head, model.groups, model.numerics, clock=model.clock)


def drafted_config(config: V4Config) -> V4Config:
    """The config with a drafter of its own."""
    layers = tuple(range(config.num_hidden_layers - 3, config.num_hidden_layers))
    fields = DSparkFields(BLOCK, config.vocab_size - 1, layers, MARKOV_RANK, STAGES)
    return replace(config, draft_ratios=(0,) * STAGES, dspark=fields)


@dataclass
class Rejected(Beside):
    """A drafter whose every draft is moved to the next id, so that the target does not take it. again: makes the calls
    of the last step once more, with a plain choice, as a drafter alone would."""

    vocab: int
    again: list[Callable[[], object]] = field(default_factory=list)

    def keep(self, rows: KeptRows, taps: Mapping[Tap, torch.Tensor], caches: Caches) -> None:
        """As the drafter does."""
        super().keep(rows, taps, caches)
        self.again = [partial(self.inner.keep, rows, taps, caches)]

    def propose(
        self, anchors: Anchors, caches: Caches, *, choose: Choose = choose_greedy, keep_logits: bool = False
    ) -> Drafts:
        """The drafter's, moved."""
        drafts = super().propose(anchors, caches, choose=choose, keep_logits=keep_logits)
        self.again.append(partial(self.inner.propose, anchors, caches))
        return replace(drafts, ids=(drafts.ids + 1) % self.vocab)


@dataclass(frozen=True)
class StepCost:
    """Seconds by round: of whole steps, of the target's forward at the same rows, and of the drafter."""

    batch: int
    rows: int
    accepted: int
    step_s: tuple[float, ...]
    target_s: tuple[float, ...]
    drafter_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """A step by its parts, by round."""
        parts = zip(self.step_s, self.target_s, self.drafter_s, strict=True)
        return [step / (target + drafter) for step, target, drafter in parts]


def step_cost(model: Model, prompts: Sequence[Sequence[int]], rounds: int, seed: int) -> StepCost:
    """Whole steps and their parts in turn: step, target alone, drafter alone. One rank, a config with a drafter."""
    proposer = Rejected(DSparkProposer(with_random_drafter(model, seed)), model.config.vocab_size)
    count, new_tokens = len(prompts), rounds + GRACE + 2 + proposer.gamma
    length = len(prompts[0]) + new_tokens
    engine = Engine(model, requests=count, max_context=length, prefix_points=0, proposer=proposer)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(new_tokens))
    for _ in range(GRACE):
        engine.step()
    times: list[tuple[float, float, float]] = []
    rows = 0
    for _ in range(rounds):
        whole = _timed(engine.step)
        requests = list(engine.requests.values())
        picked = pick_rows(requests, {}, {request.slot: 1 + len(request.drafts) for request in requests})
        rows = sum(len(each.tokens) for _, each in picked)
        alone = _timed(partial(_target, engine, picked))
        times.append((whole, alone, sum(_timed(call) for call in proposer.again)))
    drafts = engine.metrics()["drafts"]
    engine.close()
    steps, targets, drafters = zip(*times, strict=True)
    return StepCost(count, rows, drafts["accepted"], steps, targets, drafters)


@torch.inference_mode()
def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _target(engine: Engine, picked: Sequence[tuple[RequestState, RequestRows]]) -> object:
    """The forward of the step that has just run, whose decisions nobody has learned yet: the same rows once more."""
    states, rows = [state for state, _ in picked], [each for _, each in picked]
    return target(rows, states, engine.decoder, False)
