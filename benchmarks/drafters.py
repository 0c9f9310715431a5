"""`meshspark bench drafters`: drafters of one target beside each other and beside plain decoding, by kind of text.

Prompts are cut from the files of Python's standard library that the bundled sample was not trained on, in three kinds
from rigid to free (benchmarks/domains.py has the rule) and from all of it, or from texts of yours. Of each drafter and
kind of text: accepted length, acceptance by position, tokens/s over plain decoding in the same run, what confidence
thresholds leave, and how reliable confidences are, before and after the calibration beside the checkpoint.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..comm.agreement import sleep, wake
from ..launch.exchange import try_exchanges
from ..launch.flags import FlagError, FlagParser, RunFlags, add_common, check_range
from ..launch.generate import SAMPLE
from ..launch.output import people, show, write_json
from ..launch.spawn import run_job
from ..launch.tokenizer import TextTokenizer
from ..launch.worker import config_facts, named_stage, resolve_here, run_main
from ..models.checkpoint.verify import read_config
from ..models.dspark.reliability import reliability_plot
from ..models.selfcheck import holds_everywhere
from ..parallel.groups import Groups
from . import report
from .domains import ALL, KINDS, Domain, domains_of_files, held_out_domains
from .drafter_report import make_rows, panels, plot, tables
from .drafter_runs import PLAIN, Drafter, Load, Side, load_drafters, measure

MODULE = "meshspark.benchmarks.drafters"
MOST = {
    "prompts": 1 << 16,
    "prompt_tokens": 1 << 16,
    "new_tokens": 1 << 16,
    "batch": 1 << 16,
    "rounds": 10_000,
}
MOST_TEMPERATURE = 100.0


@dataclass(frozen=True)
class Plan:
    """What the verb's own flags ask for. texts: of the user, (kind, file), none for the held-out domains."""

    drafters: tuple[tuple[str, Path], ...]
    domains: tuple[str, ...]
    texts: tuple[tuple[str, Path], ...]
    prompts: int
    prompt_tokens: int
    new_tokens: int
    batch: int
    rounds: int
    temperature: float
    thresholds: tuple[float, ...]
    against: str | None
    plot: str | None
    reliability: str | None


def parser() -> FlagParser:
    """The verb's flags."""
    flags = FlagParser(prog="meshspark bench drafters", description=__doc__, allow_abbrev=False)
    flags.add_argument(
        "--drafter",
        action="append",
        metavar="NAME=DIR",
        help="a checkpoint of the target with a DSpark drafter, an MTP layer or none; repeatable (default: the sample)",
    )
    flags.add_argument(
        "--domains", default=",".join((*KINDS, ALL)), metavar="KIND,...", help="of the held-out files (default: all)"
    )
    flags.add_argument(
        "--text", action="append", default=[], metavar="KIND=FILE", help="a text of your own instead; repeatable"
    )
    flags.add_argument("--prompts", type=int, default=8, metavar="N", help="of each kind (default: 8)")
    flags.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="of each prompt (default: 64)")
    flags.add_argument("--new-tokens", type=int, default=96, metavar="N", help="behind each prompt (default: 96)")
    flags.add_argument("--batch", type=int, default=1, metavar="N", help="requests of a TP group at once (default: 1)")
    flags.add_argument("--rounds", type=int, default=3, help="counted rounds (default: 3)")
    flags.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    flags.add_argument(
        "--thresholds", default="", metavar="C,...", help="verify drafts up to the first of less confidence, too"
    )
    flags.add_argument(
        "--against", metavar="NAME", help="a drafter that speeds are told over, too (default: the first MTP layer)"
    )
    flags.add_argument("--plot", metavar="FILE", help="what was measured as a picture (needs the extra plot)")
    flags.add_argument("--reliability", metavar="FILE", help="reliability by draft as a picture (needs the extra plot)")
    add_common(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where a rank failed or ids differ that are promised to be the same, 2 for wrong flags."""
    return run_main("bench drafters", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    flags = resolve_here(args)
    plan = prepare(args)
    facts = {**config_facts(plan.drafters[0][1]), "plan": repr(plan)}
    return run_job(MODULE, arguments, flags, lambda groups: run(plan, flags, groups), facts)


def prepare(args: argparse.Namespace) -> Plan:
    """The plan of the flags. FlagError, ValueError."""
    for name, most in MOST.items():
        check_range(f"--{name.replace('_', '-')}", getattr(args, name), 1, most)
    check_range("--temperature", args.temperature, 0, MOST_TEMPERATURE)
    given = [f"{SAMPLE.name}={SAMPLE}"] if args.drafter is None else args.drafter
    drafters = tuple(_named("--drafter", each) for each in given)
    _check_drafters(drafters, args.prompt_tokens + args.new_tokens)
    texts = tuple(_named("--text", each) for each in args.text)
    for _, path in texts:
        if not path.is_file():
            raise ValueError(f"--text is {str(path)!r}, where there is no file")
    domains = tuple(dict.fromkeys(name for name, _ in texts) if texts else _domains(args.domains))
    for name in ("plot", "reliability"):
        report.check_target(f"--{name}", getattr(args, name))
        if getattr(args, name):
            report.plotting()
    return Plan(
        drafters=drafters,
        domains=domains,
        texts=texts,
        prompts=args.prompts,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        batch=args.batch,
        rounds=args.rounds,
        temperature=args.temperature,
        thresholds=_thresholds(args.thresholds),
        against=_against(args.against, drafters),
        plot=args.plot,
        reliability=args.reliability,
    )


def _named(flag: str, text: str) -> tuple[str, Path]:
    name, equals, place = text.partition("=")
    if not equals or not name or not place:
        raise FlagError(f"{flag} is {text!r}, allowed: a name, = and a path")
    return name, Path(place)


def _check_drafters(drafters: Sequence[tuple[str, Path]], positions: int) -> None:
    names = [name for name, _ in drafters]
    if len(set(names)) < len(names) or PLAIN in names:
        raise FlagError(f"--drafter has the names {', '.join(names)}, allowed: each once, and not {PLAIN}")
    for _, directory in drafters:
        if not (directory / "config.json").is_file():
            raise ValueError(f"--drafter is {str(directory)!r}, where there is no config.json")
        most = read_config(directory).max_position_embeddings
        if positions > most:
            raise FlagError(f"--prompt-tokens and --new-tokens are {positions}, allowed: {most} together")


def _domains(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not set(found) <= {*KINDS, ALL} or len(set(found)) < len(found):
        raise FlagError(f"--domains is {text!r}, allowed: some of {','.join((*KINDS, ALL))}, each once")
    return found


def _thresholds(text: str) -> tuple[float, ...]:
    try:
        found = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [-1.0]
    if not all(0 <= value <= 1 for value in found):
        raise FlagError(f"--thresholds is {text!r}, allowed: numbers from 0 to 1 between commas")
    return tuple(found)


def _against(name: str | None, drafters: Sequence[tuple[str, Path]]) -> str | None:
    if name is None:
        return next((each for each, directory in drafters if read_config(directory).drafter == "mtp"), None)
    if name not in dict(drafters):
        raise FlagError(f"--against is {name!r}, allowed: {', '.join(each for each, _ in drafters)}")
    return name


def run(plan: Plan, flags: RunFlags, groups: Groups) -> None:
    """Measure on every rank; world rank 0 tells.

    RuntimeError behind the tables where greedy ids differ that are promised to be the same.
    """
    if groups.topology.world > 1:
        try_exchanges(groups)
    with named_stage("load"):
        drafters = load_drafters(groups, plan.drafters, flags)
        promised = holds_everywhere(groups, drafters[0].model.config, drafters[0].model.numerics)
    with named_stage("texts"):
        domains = _cut_on_front(plan, groups)
    sides: list[Side] = []
    with named_stage("step", lambda: drafters[0].model.clock.current):
        for name in plan.domains:
            prompts = domains[name].prompts if domains else ()
            load = Load(prompts, plan.prompt_tokens, plan.new_tokens, plan.batch, plan.temperature, flags.seed)
            sides += measure(drafters, name, load, rounds=plan.rounds, thresholds=plan.thresholds)
    if not groups.rank:
        tell(plan, flags, groups, drafters, sides, promised=promised)


def _cut_on_front(plan: Plan, groups: Groups) -> dict[str, Domain]:
    """The domains by name on world rank 0, which alone has requests; the others wait for it, and have none."""
    if groups.rank:
        sleep(groups)
        return {}
    directory = plan.drafters[0][1]
    tokenizer = TextTokenizer.load(directory, read_config(directory).vocab_size)
    size = {"prompts": plan.prompts, "tokens": plan.prompt_tokens}
    texts, names = plan.texts, plan.domains
    found = domains_of_files(texts, tokenizer, **size) if texts else held_out_domains(names, tokenizer, **size)
    wake(groups)
    return {each.name: each for each in found}


def tell(
    plan: Plan, flags: RunFlags, groups: Groups, drafters: Sequence[Drafter], sides: Sequence[Side], *, promised: bool
) -> None:
    """JSON, tables and pictures. RuntimeError where greedy ids differ that are promised to be the same."""
    rows = make_rows(sides, drafters, plan.against)
    document: dict[str, Any] = {
        "benchmark": "drafters",
        "topology": asdict(groups.topology),
        "numerics": flags.numerics,
        "threads": torch.get_num_threads(),
        "row_independence": promised,
        "drafters": [_about(each, dict(plan.drafters)[each.name]) for each in drafters],
        **{name: getattr(plan, name) for name in (*MOST, "temperature", "against")},
        "rows": rows,
    }
    write_json(flags.json, document)
    show(people(flags.json), *tables(rows, plan.against))
    if plan.plot:
        plot(rows, plan.plot)
    if plan.reliability:
        reliability_plot(panels(sides, drafters), plan.reliability)
    parted = [f"{side.domain}, {side.name}, prompt {at[0]}, new token {at[1]}" for side in sides for at in side.parted]
    if parted and promised and plan.temperature == 0:
        raise RuntimeError(f"drafting changed ids that are promised to be the same here: {'; '.join(parted)}")


def _about(drafter: Drafter, directory: Path) -> dict[str, Any]:
    heat = None if drafter.calibration is None else list(drafter.calibration.temperatures)
    kind, gamma = drafter.drafting.speculative, drafter.drafting.gamma
    return {"name": drafter.name, "directory": str(directory), "kind": kind, "gamma": gamma, "temperatures": heat}


if __name__ == "__main__":
    sys.exit(main())
