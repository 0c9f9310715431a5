"""Prefill speed against transformers: one prompt in one step, the same weights and threads, in rounds that alternate.

Cases: slice, a slice of Flash at its true widths; tiny, the same at test size.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..launch.flags import FlagParser, RunFlags
from ..launch.output import people
from ..launch.worker import resolve_here, run_main
from ..layouts.rows import RequestRows
from ..models.v4.model import Model
from ..models.v4.pools import CacheShape
from ..models.v4.traffic import even_load
from . import contest, rounds
from .contest import Contest
from .limits import Meter, Work, least_work, make_meter
from .rounds import Load, Report, Rounds, Row, Side
from .slice import CASES

BENCHMARK = "prefill"
NUMERICS = {"slice": ("w8a8", "bfloat16"), "tiny": ("float32",)}
"""Case -> ours by default, in the order in which the cases run."""

TOKENS = {"slice": "512", "tiny": "200"}
MOST_TOKENS = 16_384
SLOT = 0


@dataclass(frozen=True)
class Plan:
    """What the flags ask for."""

    cases: tuple[str, ...]
    numerics: dict[str, tuple[str, ...]]
    layers: tuple[int, ...]
    tokens: dict[str, tuple[int, ...]]
    rounds: int
    stages: bool
    seed: int


class OurPrompt:
    """A prompt in one step of a model, over the same pages in every run."""

    steps = 1

    def __init__(self, model: Model, tokens: list[int]) -> None:
        self.model, self.tokens = model, tokens
        self.caches = model.make_caches(CacheShape(1, len(tokens), len(tokens)))
        self.caches.admit(SLOT, len(tokens))
        self.hit: dict[int, float] = {}

    @torch.no_grad()
    def run(self) -> torch.Tensor:
        """Logits [1, V] of the last token."""
        plan = self.model.plan([RequestRows(SLOT, 0, self.tokens, asked=(len(self.tokens) - 1,))], self.caches)
        output = self.model.forward(plan, self.caches)
        assert output.logits is not None
        self.hit = {layer: int((count > 0).sum()) for layer, count in output.counts.items()}
        return output.logits

    def work(self) -> Work:
        rows = len(self.tokens)
        load = even_load(1, requests=0, rows_each=1, prefill_rows=rows, prompts_ending=1)
        # A row of the prompt has half of it before itself, on the average.
        return least_work(self.model.config, self.model.numerics, load, rows // 2, self.hit)


@torch.no_grad()
def their_prompt(net: torch.nn.Module, tokens_1S: torch.Tensor) -> torch.Tensor:
    """The same of the peer, which keeps its cache too."""
    logits: torch.Tensor = net(tokens_1S, use_cache=True, logits_to_keep=1).logits
    return logits[0]


def prompt_rows(plan: Plan, load: Load, held: Contest, meter: Meter) -> tuple[list[Row], Rounds]:
    """Our models and the peers in turn."""
    generator = torch.Generator().manual_seed(plan.seed)
    tokens_1S = torch.randint(2, held.config.vocab_size, (1, load.rows), generator=generator)
    ours = {Side(name, 0): OurPrompt(model, tokens_1S[0].tolist()) for name, model in held.models.items()}
    sides: dict[Side, tuple[Callable[[], torch.Tensor], int]] = {side: (one.run, 1) for side, one in ours.items()}
    for name, net in held.peers.items():
        sides[Side(name, 0, peer=True)] = (partial(their_prompt, net, tokens_1S), 1)
    found = rounds.take_turns(sides, meter, plan.rounds)
    return contest.our_rows(load, ours, found, plan.stages), found


def parser() -> FlagParser:
    """The benchmark's flags."""
    flags = FlagParser(prog="meshspark bench prefill", description=__doc__, allow_abbrev=False)
    contest.add_flags(flags, list(NUMERICS), rounds=3)
    flags.add_argument("--tokens", metavar="N,...", help=f"ids of the prompt (default: {TOKENS['slice']})")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 where both sides did not do the same work; 2 for wrong flags, or what cannot be used."""
    return run_main("bench prefill", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    flags = resolve_here(args)
    plan = prepare(args, flags)
    torch.set_num_threads(args.threads)
    report = Report(BENCHMARK, people(flags.json))
    for case in plan.cases:
        meter = make_meter(case, plan.numerics[case])
        held = contest.make_contest(CASES[case](plan.layers), plan.numerics[case], plan.seed)
        for tokens in plan.tokens[case]:
            report.add(*prompt_rows(plan, Load(case, 1, tokens), held, meter))
    return report.end(flags.json, args.plot, seed=plan.seed)


def prepare(args: argparse.Namespace, flags: RunFlags) -> Plan:
    """The plan of the flags, all of them checked. FlagError."""
    contest.one_process(args, flags, "bench prefill")
    cases = contest.chosen("--case", args.case, list(NUMERICS), [case for case in NUMERICS if case != "tiny"])
    layers, tokens = contest.layers_of(args.layers), {}
    for case in cases:
        most = min(MOST_TOKENS, CASES[case](layers).max_position_embeddings)
        tokens[case] = contest.numbers("--tokens", args.tokens or TOKENS[case], 1, most)
    return Plan(
        cases=cases,
        numerics={case: contest.chosen("--numerics", args.modes, contest.NAMES, NUMERICS[case]) for case in cases},
        layers=layers,
        tokens=tokens,
        rounds=args.rounds,
        stages=args.stages,
        seed=flags.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
