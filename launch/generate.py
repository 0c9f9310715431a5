"""`meshspark generate`: write text with a checkpoint on a mesh of ranks."""

import argparse
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from ..models.checkpoint.loader import load_on_all_ranks
from ..models.checkpoint.share import RankWeights
from ..models.checkpoint.verify import read_config
from ..models.dspark.proposer import Proposer
from ..models.dspark.step import Judged
from ..models.numerics import numerics
from ..models.request import SamplingParams
from ..models.selfcheck import holds_everywhere
from ..models.v4.config import V4Config
from ..models.v4.model import Model
from ..parallel.groups import Groups
from ..parallel.topology import Topology
from .chat import FORMS, Message, encode_chat
from .compare_runs import Comparison, Run, compare, turns
from .deployment import DEPLOYMENTS, Row, parse_with_point, show_point
from .draft_tables import draft_figures, draft_tables, drafting_json
from .drafting import Drafting, add_drafting_flags, drafting_flags, make_proposer
from .engine import Engine
from .engine_flags import EngineFlags, add_engine_flags, engine_flags
from .exchange import try_exchanges
from .flags import FlagParser, RunFlags, add_common, check_range
from .memory import engine_arguments
from .output import people, show, write_json
from .requests import RequestFailed
from .spawn import run_job
from .ties import with_ties
from .tokenizer import TextTokenizer
from .worker import config_facts, named_stage, resolve_here, run_main
from .writing import Printer, Writing, result_json, result_tables

MODULE = "meshspark.launch.generate"
SAMPLE = Path(__file__).parent.parent / "models" / "sample"
MAX_SLOTS = 8
PROMPT_FILE_LIMIT = 16 << 20
SEEDS = 1 << 63


@dataclass(frozen=True)
class Task:
    """What to write: the checkpoint, the prompts as text and ids, and how."""

    directory: Path
    config: V4Config
    tokenizer: TextTokenizer
    prompts: tuple[str, ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    chat: str | None
    stops: tuple[str, ...]
    params: SamplingParams
    engine: EngineFlags = field(default_factory=EngineFlags)
    context: int | None = None
    deployment: str | None = None
    point: tuple[Row, ...] = ()
    drafting: Drafting = field(default_factory=Drafting)

    @property
    def longest(self) -> int:
        """Positions of the longest request."""
        return max(map(len, self.prompt_ids)) + self.params.max_new_tokens

    @property
    def max_context(self) -> int:
        return max(self.longest, self.drafting.least_context) if self.context is None else self.context

    def requests(self, topology: Topology) -> int:
        """Requests of a TP group at once: all prompts over the groups, if they are few; the others wait."""
        return self.engine.batch or min(MAX_SLOTS * topology.tp, -(-len(self.prompts) // topology.dp))

    def facts(self) -> dict[str, str | int | float]:
        """What must be equal on all ranks."""
        ids = hashlib.sha256(repr((self.prompt_ids, self.stops)).encode()).hexdigest()[:16]
        return {
            **config_facts(self.directory),
            "prompts": ids,
            "params": repr(self.params),
            "engine": repr(self.engine),
            "drafting": repr(self.drafting),
        }


def parser() -> FlagParser:
    """The verb's flags."""
    flags = FlagParser(prog="meshspark generate", description=__doc__, allow_abbrev=False)
    flags.add_argument("--checkpoint", type=Path, default=SAMPLE, metavar="DIR", help="default: the bundled sample")
    flags.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given more than once")
    flags.add_argument(
        "--prompt-file", action="append", default=[], type=Path, metavar="FILE", help="a file whose text is one prompt"
    )
    flags.add_argument(
        "--chat", nargs="?", const="chat", choices=FORMS, help="prompts are a user's messages, in the official encoding"
    )
    flags.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    flags.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    flags.add_argument("--top-p", type=float, default=1.0, help="share of probability to draw from (default: 1)")
    flags.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="the K likeliest to draw from, 0: all (default)"
    )
    flags.add_argument(
        "--min-p", type=float, default=0.0, help="leave out what has less than this share of the likeliest (default: 0)"
    )
    flags.add_argument("--ignore-eos", action="store_true", help="the end token never comes")
    flags.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    flags.add_argument(
        "--context", type=int, metavar="N", help="positions that one request may hold (default: what the longest needs)"
    )
    flags.add_argument(
        "--deployment", choices=sorted(DEPLOYMENTS), help="all settings of a point at once; a flag beside it wins"
    )
    add_engine_flags(flags)
    add_drafting_flags(flags)
    add_common(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 for a failure, 2 for wrong flags or a missing checkpoint, 130 for an interrupt."""
    return run_main("generate", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args, point = parse_with_point(parser, arguments)
    flags = resolve_here(args)
    task = replace(prepare(args, flags), deployment=args.deployment, point=point)
    return run_job(MODULE, arguments, flags, lambda groups: generate(groups, task, flags), task.facts())


def prepare(args: argparse.Namespace, flags: RunFlags) -> Task:
    """Check everything that can be checked before a rank starts. ValueError."""
    directory: Path = args.checkpoint
    require_checkpoint(directory)
    config = read_config(directory)
    flags.topology.check_model(config.o_groups, config.vocab_size, config.n_routed_experts)
    tokenizer = TextTokenizer.load(directory, config.vocab_size)
    prompts = tuple(args.prompt) + tuple(
        read_text_file("--prompt-file", path, PROMPT_FILE_LIMIT) for path in args.prompt_file
    )
    if not prompts:
        raise ValueError("there is no prompt; give --prompt TEXT or --prompt-file FILE")
    if "" in args.stop:
        raise ValueError("--stop is empty, allowed: at least one character")
    given = (args.max_new_tokens, args.temperature, args.top_p, flags.seed, config.eos_token_id)
    params = SamplingParams(*given, top_k=args.top_k, min_p=args.min_p, ignore_eos=args.ignore_eos)
    ids = tuple(tuple(encode_prompt(prompt, tokenizer, args.chat)) for prompt in prompts)
    task = Task(directory, config, tokenizer, prompts, ids, args.chat, tuple(args.stop), params, engine_flags(args))
    task = replace(task, context=args.context, drafting=drafting_flags(args, config, directory))
    if not all(ids):
        raise ValueError(f"prompt {ids.index(()) + 1} is empty, and {tokenizer.source} has no begin token")
    most = config.max_position_embeddings
    if args.context is not None:
        check_range("--context", args.context, task.drafting.least_context, most)
        most = args.context
    if task.longest > most:
        raise ValueError(
            f"the longest prompt of {task.longest - params.max_new_tokens} ids and --max-new-tokens "
            f"{params.max_new_tokens} are {task.longest} positions, allowed: {most}"
        )
    return task


def require_checkpoint(directory: Path) -> None:
    """ValueError where --checkpoint names a folder without a config.json."""
    if not (directory / "config.json").is_file():
        what = "the bundled sample is not there" if directory == SAMPLE else "there is no checkpoint"
        raise ValueError(f"{what}: {directory / 'config.json'} does not exist; give --checkpoint DIR")


def encode_prompt(prompt: str, tokenizer: TextTokenizer, chat: str | None) -> list[int]:
    """A prompt's ids: the official chat encoding, or the text after the begin token where there is one."""
    if chat is not None:
        return encode_chat([Message("user", prompt)], tokenizer, chat)
    return ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(prompt)


def read_text_file(flag: str, path: Path, limit: int) -> str:
    """The text of a file of at most `limit` bytes that a flag names. ValueError naming both where it is none."""
    try:
        if path.stat().st_size > limit:
            raise ValueError(f"{flag} {path} has {path.stat().st_size} bytes, allowed: {limit}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ValueError(f"{flag} {path}: {problem}") from problem


def generate(groups: Groups, task: Task, flags: RunFlags) -> None:
    """One rank's part: load, run the engine, and on world rank 0 print."""
    if groups.topology.world > 1:
        try_exchanges(groups)
    with named_stage("load"):
        model, proposer = load_with_drafter(groups, task.directory, flags, task.drafting)
        independent = holds_everywhere(groups, model.config, model.numerics)
    model.clock.enabled = True
    if groups.rank == 0 and task.deployment is not None:
        show_point(people(flags.json), task.deployment, task.point)
    with named_stage("step", lambda: model.clock.current):
        run, comparison = run_prompts(model, proposer, task, people(flags.json))
    if task.drafting.compare and task.params.temperature == 0:
        with named_stage("ties"):
            exact = replace(flags, numerics="float64")
            comparison = with_ties(
                comparison, groups, model.numerics, lambda: load_model(groups, task.directory, exact)
            )
    if run is not None:
        tell(run, comparison, {**run.metrics, "row_independence": independent}, groups.topology, task, flags)


def tell(
    run: Run,
    comparison: Comparison | None,
    metrics: Mapping[str, Any],
    topology: Topology,
    task: Task,
    flags: RunFlags,
) -> None:
    """Write the JSON and the tables, then raise what went wrong: RequestFailed for requests that ended as an error,
    RuntimeError where greedy ids, promised to be the same with drafting and without, are not."""
    result, out = result_json(run.writings, topology, metrics), people(flags.json)
    if task.drafting.on:
        result["drafting"] = drafting_json(task.drafting)
        result["metrics"] |= draft_figures(metrics, comparison)
    write_json(flags.json, result)
    result_tables(out, run.writings, topology, metrics)
    if task.drafting.on:
        show(out, *draft_tables(task.drafting, metrics, comparison))
    failed = [f"prompt {w.number + 1} on rank {w.rank}" for w in run.writings if w.finish_reason == "error"]
    if failed:
        raise RequestFailed(f"{', '.join(failed)}: ended as error, for a row of logits is not finite")
    promised = metrics["row_independence"] and task.params.temperature == 0
    if promised and comparison is not None and comparison.divergences:
        parts = "; ".join(map(str, comparison.divergences))
        raise RuntimeError(f"drafting changed ids that are promised to be the same here: {parts}")


def load_model(groups: Groups, directory: Path, flags: RunFlags) -> Model:
    """This rank's share of a checkpoint as a model on its device. All ranks call it."""
    return load_with_drafter(groups, directory, flags, Drafting())[0]


def load_with_drafter(
    groups: Groups, directory: Path, flags: RunFlags, drafting: Drafting
) -> tuple[Model, Proposer | None]:
    """The model, and this rank's proposer where anything is drafted. All ranks call it."""
    mode = numerics(flags.numerics)
    config, weights = load_on_all_ranks(directory, groups, mode, draft=drafting.on)
    if groups.device != "cpu":
        moved = {name: weight.to(groups.device) for name, weight in weights.items()}
        weights = RankWeights(moved, weights.topology, weights.rank, notes=weights.notes, log=weights.log)
    model = Model(config, weights, groups, mode)
    return model, make_proposer(drafting, weights, model)


def run_prompts(
    model: Model, proposer: Proposer | None, task: Task, stream: TextIO
) -> tuple[Run | None, Comparison | None]:
    """All prompts once, or for --compare with drafting and without in turn; the run that is told of, the last one, and
    the comparison. None on other ranks than world rank 0. Text is shown as the first run that drafts writes it."""
    if not task.drafting.compare:
        return run_once(model, proposer, task, stream), None
    runs: list[tuple[bool, Run]] = []
    shown = False
    for drafts in turns():
        run = run_once(model, proposer if drafts else None, task, None if shown or not drafts else stream)
        shown = shown or drafts
        if run is not None:
            runs.append((drafts, run))
    return (runs[-1][1], compare(runs)) if runs else (None, None)


def run_once(
    model: Model,
    proposer: Proposer | None,
    task: Task,
    stream: TextIO | None,
    judge: Callable[[Judged], None] | None = None,
) -> Run | None:
    """All prompts through an engine of their own, shown on `stream` if there is one; None where rank 0 is elsewhere.

    judge: as of Engine."""
    engine = Engine(
        model,
        requests=task.requests(model.groups.topology),
        max_context=task.max_context,
        **engine_arguments(task.engine, model.groups),
        **task.drafting.arguments(proposer),
        judge=judge,
    )
    # What an engine may have run to time its steps is none of the prompts'.
    model.clock.seconds.clear()
    if not engine.is_front:
        engine.serve()
        return None
    writings = write(engine, task, Printer(stream, len(task.prompts), show_prompt=task.chat is None))
    engine.close()
    return Run(tuple(writings), engine.metrics())


def write(engine: Engine, task: Task, printer: Printer) -> list[Writing]:
    """Run all prompts to their ends on world rank 0, printing as text comes.

    A prompt's numbers come from the seed alone, whatever else is written; given again, it draws from the next seed.
    """
    by_request: dict[int, Writing] = {}
    for number, (prompt, ids) in enumerate(zip(task.prompts, task.prompt_ids, strict=True)):
        writing = Writing(number, prompt, ids, task.tokenizer, task.stops)
        repeat = task.prompts[:number].count(prompt)
        params = replace(task.params, seed=(task.params.seed + repeat) % SEEDS)
        by_request[engine.add_request(list(ids), params)] = writing
        printer.start(writing)
    while engine.active:
        for event in engine.step():
            writing = by_request[event.request_id]
            printer.more(writing, writing.take(event))
            if writing.stopped and event.finish_reason is None:
                engine.cancel(event.request_id, "stop")
            if event.finish_reason is not None:
                printer.end(writing)
    return list(by_request.values())


if __name__ == "__main__":
    sys.exit(main())
