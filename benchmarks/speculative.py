"""`meshspark bench speculative`: what drafting is worth, with an oracle for a drafter, on a checkpoint's target.

* oracle: tokens/s by the chance that a draft is right, and by gamma, over plain decoding.
* widths: scheduled verification against every fixed width, requests of mixed chances.
* rejected: a step whose drafts are all rejected, against the target at the same rows and the drafter, each alone.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..launch.flags import FlagError, FlagParser, RunFlags, add_common, check_range
from ..launch.generate import SAMPLE, load_model
from ..launch.output import people, show, write_json
from ..launch.spawn import run_job
from ..launch.worker import config_facts, resolve_here, run_main
from ..models.checkpoint.loader import load_weights
from ..models.checkpoint.verify import read_config
from ..models.dspark.schedule import parse_verify
from ..models.numerics import numerics
from ..models.v4.model import Model
from ..parallel.groups import Groups
from ..parallel.topology import Topology
from . import report
from .drafted import Side, take_turns, write_text
from .rejected import StepCost, drafted_config, step_cost

MODULE = "meshspark.benchmarks.speculative"
CASES = ("oracle", "widths", "rejected")
PLAIN = Side("none", 0)
MOST = {"rounds": 10_000, "steps": 10_000, "new_tokens": 1 << 16, "prompt_tokens": 1 << 16}
LISTS = {"batches": (1, 1024), "gammas": (1, 64)}


@dataclass(frozen=True)
class Plan:
    """What the verb's own flags ask for."""

    case: str
    checkpoint: Path
    batches: tuple[int, ...]
    gammas: tuple[int, ...]
    chances: tuple[float, ...]
    prompt_tokens: int
    new_tokens: int
    rounds: int
    steps: int
    plot: str | None


def parser() -> FlagParser:
    """The verb's flags."""
    flags = FlagParser(prog="meshspark bench speculative", description=__doc__, allow_abbrev=False)
    flags.add_argument("--case", choices=CASES, default="oracle", help="default: oracle")
    flags.add_argument("--checkpoint", type=Path, default=SAMPLE, metavar="DIR", help="default: the bundled sample")
    flags.add_argument("--batches", default="8", metavar="N,...", help="requests at once (default: 8)")
    flags.add_argument("--gammas", default="1,3,5,7", metavar="N,...", help="drafts of a block (default: 1,3,5,7)")
    flags.add_argument(
        "--chances", default="0.5,0.7,0.9,1", metavar="P,...", help="that a draft is right (default: 0.5,0.7,0.9,1)"
    )
    flags.add_argument("--prompt-tokens", type=int, default=16, help="of each request (default: 16)")
    flags.add_argument("--new-tokens", type=int, default=512, help="known continuation (default: 512)")
    flags.add_argument("--rounds", type=int, default=5, help="counted rounds (default: 5)")
    flags.add_argument("--steps", type=int, default=8, help="steps of a turn (default: 8)")
    flags.add_argument("--plot", metavar="FILE", help="what was measured as a picture (needs the extra plot)")
    add_common(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where a rank failed, 2 for wrong flags."""
    return run_main("bench speculative", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    flags = resolve_here(args)
    plan = prepare(args, flags)
    facts = {**config_facts(plan.checkpoint), "plan": repr(plan)}
    return run_job(MODULE, arguments, flags, lambda groups: run(plan, flags, groups), facts)


def prepare(args: argparse.Namespace, flags: RunFlags) -> Plan:
    """The plan of the flags. FlagError, ValueError."""
    for name, most in MOST.items():
        check_range(f"--{name.replace('_', '-')}", getattr(args, name), 1, most)
    lists = {name: _numbers(f"--{name}", getattr(args, name), *limits) for name, limits in LISTS.items()}
    chances = _numbers("--chances", args.chances, 0, 1, float)
    if not (args.checkpoint / "config.json").is_file():
        raise ValueError(f"--checkpoint is {str(args.checkpoint)!r}, where there is no config.json")
    config = read_config(args.checkpoint)
    positions = args.prompt_tokens + args.new_tokens
    if positions > config.max_position_embeddings:
        raise FlagError(
            f"--prompt-tokens and --new-tokens are {positions}, allowed: {config.max_position_embeddings} together"
        )
    if args.case == "rejected" and flags.topology.world > 1:
        raise FlagError(f"--case rejected runs on 1 rank, not on {flags.topology.world}")
    report.check_target("--plot", args.plot)
    if args.plot and args.case == "rejected":
        raise FlagError("--plot is for the cases oracle and widths")
    if args.plot:
        report.plotting()
    return Plan(
        case=args.case,
        checkpoint=args.checkpoint,
        batches=tuple(map(int, lists["batches"])),
        gammas=tuple(map(int, lists["gammas"])),
        chances=tuple(chances),
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        rounds=args.rounds,
        steps=args.steps,
        plot=args.plot,
    )


def _numbers(flag: str, text: str, least: float, most: float, kind: type = int) -> list[float]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(least <= number <= most for number in found):
        raise FlagError(f"{flag} is {text!r}, allowed: numbers from {least} to {most} between commas")
    return found


def run(plan: Plan, flags: RunFlags, groups: Groups) -> None:
    """Measure on every rank; world rank 0 tells."""
    if plan.case == "rejected":
        rows = [asdict(_rejected(plan, flags, batch)) for batch in plan.batches]
    else:
        model = load_model(groups, plan.checkpoint, flags)
        rows = [row for batch in plan.batches for row in _turns(plan, model, batch, flags.seed)]
    if groups.rank:
        return
    document = {
        "benchmark": "speculative",
        "case": plan.case,
        "topology": asdict(groups.topology),
        "numerics": flags.numerics,
        "threads": torch.get_num_threads(),
        "rounds": plan.rounds,
        "steps": plan.steps,
        "rows": rows,
    }
    write_json(flags.json, document)
    show(people(flags.json), table(plan.case, rows))
    if plan.plot:
        plot(plan, rows, plan.plot)


def _prompts(plan: Plan, vocab: int, batch: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(2, vocab, (batch, plan.prompt_tokens), generator=generator).tolist()
    return found


def _turns(plan: Plan, model: Model, batch: int, seed: int) -> list[dict[str, Any]]:
    text = write_text(model, _prompts(plan, model.config.vocab_size, batch, seed), plan.new_tokens)
    sides = oracle_sides(plan) if plan.case == "oracle" else width_sides(plan)
    found = take_turns(model, text, [PLAIN, *sides], rounds=plan.rounds, steps=plan.steps)
    rows: list[dict[str, Any]] = []
    for side in [PLAIN, *sides]:
        median, least, most = found.ratio(side.name, PLAIN.name)
        rows.append({
            "side": side.name,
            "batch": batch,
            "gamma": side.gamma,
            "chances": list(side.chances),
            "verify": side.verify.kind,
            "tokens_per_s": found.rate(side.name),
            "tokens_per_turn": sum(found.tokens[side.name]) / (plan.rounds * plan.steps * batch),
            "over_plain": median,
            "over_plain_min": least,
            "over_plain_max": most,
            "step_costs": found.tables[side.name].encode() if side.name in found.tables else None,
        })  # fmt: skip
    if plan.case == "widths":
        best = max((row for row in rows if row["verify"] == "all"), key=lambda row: row["tokens_per_s"])
        for row in rows:
            row["over_best"] = found.ratio(row["side"], best["side"])[0]
    return rows


def oracle_sides(plan: Plan) -> list[Side]:
    """One for each chance and gamma."""
    return [Side(f"gamma {gamma}, p {p:g}", gamma, (p,)) for p in plan.chances for gamma in plan.gammas]


def width_sides(plan: Plan) -> list[Side]:
    """Every fixed width up to the largest gamma, and the schedulers, over requests of all chances in turn."""
    most = max(plan.gammas)
    fixed = [Side(f"{gamma + 1} rows", gamma, plan.chances) for gamma in range(1, most + 1)]
    kinds = ("scheduled", "lagged")
    return [*fixed, *(Side(kind, most, plan.chances, parse_verify(kind)) for kind in kinds)]


def _rejected(plan: Plan, flags: RunFlags, batch: int) -> StepCost:
    mode = numerics(flags.numerics)
    config, weights = load_weights(plan.checkpoint, Topology(), 0, mode)
    model = Model(drafted_config(config), weights, Groups.single(), mode)
    return step_cost(model, _prompts(plan, config.vocab_size, batch, flags.seed), plan.rounds, flags.seed)


def table(case: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people."""
    if case == "rejected":
        shown = Table("batch", "rows", "accepted", "step, ms", "target, ms", "drafter, ms", "step / parts", "range")
        for row in rows:
            parts = list(zip(row["step_s"], row["target_s"], row["drafter_s"], strict=True))
            ratios = [step / (target + drafter) for step, target, drafter in parts]
            times = [f"{1000 * statistics.median(row[name]):.1f}" for name in ("step_s", "target_s", "drafter_s")]
            spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
            heads = (str(row["batch"]), str(row["rows"]), str(row["accepted"]))
            shown.add_row(*heads, *times, f"{statistics.median(ratios):.2f}", spread)
        return shown
    shown = Table("batch", "side", "tokens/s", "tokens a step", "over plain", "range", "over the best width")
    for row in rows:
        best = "-" if row.get("over_best") is None else f"{row['over_best']:.2f}"
        spread = f"{row['over_plain_min']:.2f} - {row['over_plain_max']:.2f}"
        figures = (f"{row['tokens_per_s']:.1f}", f"{row['tokens_per_turn']:.2f}", f"{row['over_plain']:.2f}")
        shown.add_row(str(row["batch"]), row["side"], *figures, spread, best)
    return shown


def plot(plan: Plan, rows: Sequence[dict[str, Any]], path: str) -> None:
    """Oracle: over plain decoding against the chance, a line for each gamma. Widths: by batch against the width."""
    figure = report.plotting().Figure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    if plan.case == "oracle":
        for gamma in plan.gammas:
            mine = [row for row in rows if row["gamma"] == gamma]
            panel.plot([row["chances"][0] for row in mine], [row["over_plain"] for row in mine], "o-", label=f"{gamma}")
        panel.set(xlabel="chance that a draft is right", ylabel="tokens/s over plain decoding")
        panel.legend(title="gamma")
    else:
        for batch in plan.batches:
            fixed = [row for row in rows if row["batch"] == batch and row["verify"] == "all"]
            (line,) = panel.plot([1 + row["gamma"] for row in fixed], [row["over_plain"] for row in fixed], "o-")
            line.set_label(f"{batch}")
            for kind, style in (("scheduled", "--"), ("lagged", ":")):
                level = next(r["over_plain"] for r in rows if r["batch"] == batch and r["verify"] == kind)
                panel.axhline(level, color=line.get_color(), linestyle=style)
        panel.set(xlabel="rows of a request (dashed: scheduled, dotted: lagged)", ylabel="tokens/s over plain decoding")
        panel.legend(title="requests")
    panel.axhline(1, color="grey", linewidth=0.5)
    report.save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(main())
