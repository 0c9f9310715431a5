"""Decode speed against transformers: the same weights, rows and threads, in rounds that alternate.

Cases: slice, single steps of a slice of Flash at its true widths, over caches filled with synthetic rows; sample, the
bundled checkpoint through our engine and transformers' generate; tiny, the slice at test size.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..launch.flags import FlagParser, RunFlags, check_range
from ..launch.generate import SAMPLE
from ..launch.output import people
from ..launch.worker import resolve_here, run_main
from ..layouts.rows import RequestRows
from ..models.v4.config import V4Config
from ..models.v4.model import Model
from ..models.v4.pools import CacheShape
from ..models.v4.traffic import even_load
from . import contest, rounds
from .contest import Contest
from .limits import Meter, Work, least_work, make_meter
from .peer import PeerSteps
from .rounds import Load, Report, Rounds, Row, Side
from .sample_decode import SampleWish, sample_rows
from .slice import CASES, Resident, draw_resident, fill_caches

BENCHMARK = "decode"
NUMERICS = {"slice": ("w8a8", "bfloat16"), "sample": ("float32", "w8a8"), "tiny": ("float32",)}
"""Case -> ours by default, in the order in which the cases run."""

CONTEXTS = {"slice": "1024,8192", "tiny": "96,384"}
LIMITS = {"steps": 64, "prompt_tokens": 1 << 20, "new_tokens": 1 << 20}
"""Number that a flag gives -> the most it may be; the least is 1."""


@dataclass(frozen=True)
class Plan:
    """What the flags ask for. verify: rows of each request in a step that verifies, 0 for no such step."""

    cases: tuple[str, ...]
    numerics: dict[str, tuple[str, ...]]
    layers: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: dict[str, tuple[int, ...]]
    verify: int
    steps: int
    rounds: int
    stages: bool
    seed: int
    sample: SampleWish

    def loads(self, case: str) -> list[Load]:
        """The steps of a case: one row of each request, and of the most requests also `verify` rows each."""
        plain = [Load(case, batch, batch) for batch in self.batches]
        most = max(self.batches)
        return plain + ([Load(case, most, most * self.verify)] if self.verify else [])


class OurSteps:
    """Steps of a model from caches that hold `resident`; every run begins there."""

    def __init__(self, model: Model, resident: Resident, tokens_KBS: torch.Tensor) -> None:
        self.model, self.start = model, resident.length
        self.tokens: list[list[list[int]]] = tokens_KBS.tolist()
        self.steps, self.batch, self.rows = tokens_KBS.shape
        # Rings hold all rows of a run, so that the next one finds again what this one found.
        fresh = self.steps * self.rows
        shape = CacheShape(self.batch, resident.length + fresh, fresh)
        self.caches = model.make_caches(shape)
        fill_caches(model, self.caches, resident, resident.length)
        self.hit: dict[int, float] = {}

    @torch.no_grad()
    def run(self) -> torch.Tensor:
        """Logits of all steps, [K * B * S, V]."""
        logits, counts = [], []
        for number, tokens_BS in enumerate(self.tokens):
            start = self.start + number * len(tokens_BS[0])
            kind = "decode" if len(tokens_BS[0]) == 1 else "verify"
            rows = [
                RequestRows(slot, start, tokens, kind=kind, asked=range(len(tokens)))
                for slot, tokens in enumerate(tokens_BS)
            ]
            output = self.model.forward(self.model.plan(rows, self.caches), self.caches)
            assert output.logits is not None
            logits.append(output.logits)
            counts.append(output.counts)
        self.hit = {layer: sum(int((c[layer] > 0).sum()) for c in counts) / len(counts) for layer in counts[0]}
        return torch.cat(logits)

    def work(self) -> Work:
        load = even_load(1, requests=self.batch, rows_each=self.rows, prefill_rows=0)
        return least_work(self.model.config, self.model.numerics, load, self.start, self.hit)


class TheirSteps:
    """The same of the peer."""

    def __init__(self, net: torch.nn.Module, resident: Resident, tokens_KBS: torch.Tensor) -> None:
        self.tokens_KBS = tokens_KBS
        self.steps = PeerSteps(net, resident)

    def run(self) -> torch.Tensor:
        self.steps.restore()
        return torch.cat([self.steps.step(tokens_BS).flatten(0, 1) for tokens_BS in self.tokens_KBS])


def step_rows(plan: Plan, load: Load, held: Contest, meter: Meter) -> tuple[list[Row], Rounds]:
    """Our models and the peers in turn, at every context."""
    ours, sides = {}, {}
    for context in plan.contexts[load.case]:
        resident = draw_resident(held.config, load.batch, context, plan.seed + context)
        tokens_KBS = _tokens(held.config, (plan.steps, load.batch, load.rows // load.batch), plan.seed)
        for name, model in held.models.items():
            ours[Side(name, context)] = OurSteps(model, resident, tokens_KBS)
            sides[Side(name, context)] = (ours[Side(name, context)].run, plan.steps)
        for name, net in held.peers.items():
            sides[Side(name, context, peer=True)] = (TheirSteps(net, resident, tokens_KBS).run, plan.steps)
    found = rounds.take_turns(sides, meter, plan.rounds)
    return contest.our_rows(load, ours, found, plan.stages), found


def _tokens(config: V4Config, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(2, config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def parser() -> FlagParser:
    """The benchmark's flags."""
    flags = FlagParser(prog="meshspark bench decode", description=__doc__, allow_abbrev=False)
    contest.add_flags(flags, list(NUMERICS), rounds=5)
    flags.add_argument("--batch", metavar="N,...", default="1,8", help="requests at once (default: %(default)s)")
    flags.add_argument("--context", metavar="N,...", help=f"positions before the step (default: {CONTEXTS['slice']})")
    flags.add_argument("--verify", type=int, default=8, help="rows of each request of one more case, with the most "
                       "requests; 0 for none (default: %(default)s)")  # fmt: skip
    flags.add_argument("--steps", type=int, default=4, help="steps of a turn, one after the other (default: 4)")
    flags.add_argument("--checkpoint", type=Path, default=SAMPLE, metavar="DIR", help="default: the bundled sample")
    flags.add_argument("--prompt-tokens", type=int, default=64, help="sample: random ids of each prompt (default: 64)")
    flags.add_argument("--new-tokens", type=int, default=64, help="sample: tokens after each prompt (default: 64)")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 where both sides did not do the same work; 2 for wrong flags, or what cannot be used."""
    return run_main("bench decode", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    flags = resolve_here(args)
    plan = prepare(args, flags)
    torch.set_num_threads(args.threads)
    report = Report(BENCHMARK, people(flags.json))
    for case in plan.cases:
        for rows, found in run_case(plan, case):
            report.add(rows, found)
    return report.end(flags.json, args.plot, seed=plan.seed, steps=plan.steps)


def prepare(args: argparse.Namespace, flags: RunFlags) -> Plan:
    """The plan of the flags, all of them checked against the models that they name. FlagError, ValueError."""
    contest.one_process(args, flags, "bench decode")
    for name, most in LIMITS.items():
        check_range(f"--{name.replace('_', '-')}", getattr(args, name), 1, most)
    check_range("--verify", args.verify, 0, 64)
    cases = contest.chosen("--case", args.case, list(NUMERICS), [case for case in NUMERICS if case != "tiny"])
    layers, batches = contest.layers_of(args.layers), contest.numbers("--batch", args.batch, 1, 1024)
    sample = SampleWish(args.checkpoint, args.prompt_tokens, args.new_tokens)
    contexts = {}
    for case in cases:
        if case == "sample":
            sample.check()
            continue
        most = CASES[case](layers).max_position_embeddings - args.steps * max(1, args.verify)
        contexts[case] = contest.numbers("--context", args.context or CONTEXTS[case], 1, most)
    return Plan(
        cases=cases,
        numerics={case: contest.chosen("--numerics", args.modes, contest.NAMES, NUMERICS[case]) for case in cases},
        layers=layers,
        batches=batches,
        contexts=contexts,
        verify=args.verify,
        steps=args.steps,
        rounds=args.rounds,
        stages=args.stages,
        seed=flags.seed,
        sample=sample,
    )


def run_case(plan: Plan, case: str) -> Iterator[tuple[list[Row], Rounds]]:
    """Rows and rounds of each load of a case, as soon as they are known."""
    names = plan.numerics[case]
    meter = make_meter(case, names)
    if case == "sample":
        yield from sample_rows(plan.sample, plan.batches, names, meter, plan.rounds, plan.seed)
        return
    held = contest.make_contest(CASES[case](plan.layers), names, plan.seed)
    for load in plan.loads(case):
        yield step_rows(plan, load, held, meter)


if __name__ == "__main__":
    sys.exit(main())
