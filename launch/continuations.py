"""Write what a checkpoint itself says behind cuts of texts, as samples to train a drafter on.

`python -m meshspark.launch.continuations --text FILE... --out DIR`: prompts are cut from the texts, the engine writes
behind them, and DIR/continuations.jsonl gets one line of prompt_ids and output_ids for each. Stopped at any moment and
started again, it goes on behind the last whole line.
"""

import argparse
import bisect
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from ..models.checkpoint.verify import read_config
from ..models.request import SamplingParams
from ..models.training.token_files import MOST_LINE_BYTES
from ..models.v4.model import Model
from ..parallel.groups import Groups
from .engine import Engine
from .engine_flags import EngineFlags, add_engine_flags, engine_flags
from .exchange import try_exchanges
from .flags import FlagError, FlagParser, RunFlags, add_common, check_range
from .generate import SAMPLE, SEEDS, load_model, require_checkpoint
from .memory import engine_arguments
from .output import SCHEMA, people, write_json
from .requests import RequestFailed
from .spawn import run_job
from .tokenizer import TextTokenizer
from .worker import config_facts, named_stage, resolve_here, run_main

MODULE = "meshspark.launch.continuations"
FILE_NAME, SETTINGS_NAME = "continuations.jsonl", "continuations.json"
LEAST_OUTPUT = 2
"""Fewer learned tokens have no place for an anchor: such continuations are left out."""
BATCH = 32
AHEAD = 4
"""Requests are taken up to so many batches before the oldest that still runs: lines are written in order."""
TELL_SECONDS = 10.0
MOST_PROMPTS, MOST_TEXT_BYTES = 1 << 26, 1 << 30

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Writer:
    """How prompts are continued: params of every request, whose seed is its number's distance from params.seed;
    at once per TP group; engine: the other flags of the engine."""

    params: SamplingParams
    at_once: int = BATCH
    engine: EngineFlags = field(default_factory=EngineFlags)

    def settings(self) -> dict[str, Any]:
        """What a run that is resumed has to have in common with the run before."""
        p = self.params
        return {
            "new_tokens": p.max_new_tokens,
            "temperature": p.temperature,
            "top_p": p.top_p,
            "top_k": p.top_k,
            "seed": p.seed,
        }


@dataclass(frozen=True)
class Progress:
    """prompts: done so far, earlier runs included; tokens and seconds: of this run."""

    prompts: int
    of: int
    tokens: int
    seconds: float


class PromptCuts(Sequence[Sequence[int]]):
    """`count` different cuts of `tokens` ids from documents, each behind the begin token where there is one.

    Drawn by the seed: more of them, from the same documents, begin with the same ones. ValueError where the documents
    have fewer different places. documents: ids without begin token.
    """

    def __init__(self, documents: Prompts, count: int, tokens: int, seed: int, begin: int | None) -> None:
        self._begin = [] if begin is None else [begin]
        self._take = tokens - len(self._begin)
        if self._take < 1 or count < 1:
            raise ValueError(
                f"prompts of {tokens} tokens, {count} of them, allowed: {1 + len(self._begin)} and 1, or more"
            )
        self._documents = [ids for ids in documents if len(ids) >= self._take]
        ends: list[int] = []
        for ids in self._documents:
            ends.append((ends[-1] if ends else 0) + len(ids) - self._take + 1)
        places = ends[-1] if ends else 0
        if places < count:
            raise ValueError(f"the texts have {places} places for prompts of {tokens} tokens, needed: {count}")
        self._starts = [_locate(place, ends) for place in _distinct(count, places, seed)]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        document, start = self._starts[index]
        return [*self._begin, *self._documents[document][start : start + self._take]]


def _distinct(count: int, below: int, seed: int) -> Iterable[int]:
    """Different numbers in the order drawn; a longer draw begins with a shorter one's."""
    draw, seen = random.Random(seed), dict[int, None]()
    while len(seen) < count:
        seen.setdefault(draw.randrange(below))
    return seen


def _locate(place: int, ends: Sequence[int]) -> tuple[int, int]:
    """(document, first token) of a place among all documents' places."""
    document = bisect.bisect_right(ends, place)
    return document, place - (ends[document - 1] if document else 0)


def continuations(
    model: Model, prompts: Prompts, writer: Writer, out: Path, tell: Callable[[Progress], None] | None = None
) -> int:
    """Write a line for every prompt to out/continuations.jsonl, in their order; the number of lines. All ranks call it.

    Goes on behind the last whole line that is there. Continuations of fewer than LEAST_OUTPUT tokens get no line.
    tell: is given the progress on world rank 0. ValueError where the file there is of other prompts or settings;
    RequestFailed where the model's numbers are not finite.
    """
    longest = max(map(len, prompts)) + writer.params.max_new_tokens
    groups = model.groups
    engine = Engine(model, requests=writer.at_once, max_context=longest, **engine_arguments(writer.engine, groups))
    if not engine.is_front:
        engine.serve()
        return 0
    first, lines, length = resume_point(out, prompts, writer)
    out.mkdir(parents=True, exist_ok=True)
    (out / SETTINGS_NAME).write_text(json.dumps({"schema": SCHEMA, **writer.settings()}) + "\n", encoding="utf-8")
    with (out / FILE_NAME).open("ab") as file:
        file.truncate(length)
        run = _Run(engine, prompts, writer, file, first, lines)
        run.drive(writer.at_once * groups.topology.dp, tell)
    engine.close()
    return run.lines


def resume_point(out: Path, prompts: Prompts, writer: Writer) -> tuple[int, int, int]:
    """(first prompt without a line, lines, bytes of whole lines) of what the folder holds.

    ValueError naming the setting or the line that differs from what this run would write.
    """
    path, settings = out / FILE_NAME, out / SETTINGS_NAME
    if not path.exists():
        return 0, 0, 0
    before = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
    for name, value in writer.settings().items():
        if before.get(name, value) != value:
            raise ValueError(f"{settings}: {name} was {before[name]!r}, now it is {value!r}; allowed: the same")
    number, lines, length = -1, 0, 0
    with path.open("rb") as file:
        while (line := file.readline(MOST_LINE_BYTES)).endswith(b"\n"):
            lines += 1
            number = _number(line, f"{path}:{lines}", number, prompts)
            length += len(line)
    return number + 1, lines, length


def _number(line: bytes, where: str, before: int, prompts: Prompts) -> int:
    try:
        data = json.loads(line)
        number, ids = data["number"], data["prompt_ids"]
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{where}: is no line of a continuation: {problem!r}") from problem
    if type(number) is not int or number <= before:
        raise ValueError(f"{where}: number is {number!r}, allowed: above {before}")
    # More prompts were asked for in the earlier run: its surplus is none of this run's business.
    if number < len(prompts) and ids != list(prompts[number]):
        raise ValueError(f"{where}: prompt_ids are not those of prompt {number}; allowed: the same texts and settings")
    return number


class _Run:
    """Requests that run, and lines that wait for an earlier one."""

    def __init__(
        self, engine: Engine, prompts: Prompts, writer: Writer, file: BinaryIO, first: int, lines: int
    ) -> None:
        self._engine, self._prompts, self._writer, self._file = engine, prompts, writer, file
        self._added = self._written = first
        self.lines = lines
        self._running: dict[int, tuple[int, list[int]]] = {}
        self._ended: dict[int, tuple[list[int], str]] = {}

    def drive(self, slots: int, tell: Callable[[Progress], None] | None) -> None:
        """Until every prompt is done. Lines are flushed as they are written."""
        begin, told, tokens = time.perf_counter(), time.perf_counter(), 0
        while self._written < len(self._prompts):
            while self._added < min(len(self._prompts), self._written + AHEAD * slots):
                self._add()
            for event in self._engine.step():
                number, output = self._running[event.request_id]
                output += event.token_ids
                tokens += len(event.token_ids)
                if event.finish_reason is not None:
                    del self._running[event.request_id]
                    self._ended[number] = (output, event.finish_reason)
            self._write()
            now, done = time.perf_counter(), self._written == len(self._prompts)
            if tell is not None and (done or now - told >= TELL_SECONDS):
                tell(Progress(self._written, len(self._prompts), tokens, now - begin))
                told = now

    def _add(self) -> None:
        params = replace(self._writer.params, seed=(self._writer.params.seed + self._added) % SEEDS)
        request = self._engine.add_request(list(self._prompts[self._added]), params)
        self._running[request] = (self._added, [])
        self._added += 1

    def _write(self) -> None:
        while self._written in self._ended:
            output, reason = self._ended.pop(self._written)
            if reason == "error":
                raise RequestFailed(f"prompt {self._written} ended as error, for a row of logits is not finite")
            if len(output) >= LEAST_OUTPUT:
                prompt = list(self._prompts[self._written])
                line = {"number": self._written, "prompt_ids": prompt, "output_ids": output, "finish_reason": reason}
                self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
                self.lines += 1
            self._written += 1
        self._file.flush()


@dataclass(frozen=True)
class Task:
    """What to write, checked."""

    directory: Path
    prompts: Prompts
    writer: Writer
    out: Path

    def facts(self) -> dict[str, str | int | float]:
        """What must be equal on all ranks."""
        ids = hashlib.sha256()
        for prompt in self.prompts:
            ids.update(repr(list(prompt)).encode())
        return {**config_facts(self.directory), "prompts": ids.hexdigest()[:16], "writer": repr(self.writer)}


def parser() -> FlagParser:
    """The flags."""
    flags = FlagParser(prog=f"python -m {MODULE}", description=__doc__, allow_abbrev=False)
    flags.add_argument("--checkpoint", type=Path, default=SAMPLE, metavar="DIR", help="default: the bundled sample")
    flags.add_argument(
        "--text", nargs="+", required=True, type=Path, metavar="FILE", help="texts that prompts are cut from, UTF-8"
    )
    flags.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of continuations.jsonl")
    flags.add_argument("--prompts", type=int, default=1000, metavar="N", help="how many (default: 1000)")
    flags.add_argument(
        "--prompt-tokens", type=int, default=32, metavar="N", help="ids of a prompt, its begin token included (32)"
    )
    flags.add_argument("--new-tokens", type=int, default=128, metavar="N", help="at most, of each (default: 128)")
    flags.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    flags.add_argument("--top-p", type=float, default=1.0, help="share of probability to draw from (default: 1)")
    add_engine_flags(flags)
    add_common(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 for a failure, 2 for wrong flags or input, 130 for an interrupt."""
    return run_main("continuations", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    flags = resolve_here(args)
    task = prepare(args, flags)
    return run_job(MODULE, arguments, flags, lambda groups: run(groups, task, flags), task.facts())


def prepare(args: argparse.Namespace, flags: RunFlags) -> Task:
    """Check everything that can be checked before a rank starts. ValueError."""
    require_checkpoint(args.checkpoint)
    config = read_config(args.checkpoint)
    flags.topology.check_model(config.o_groups, config.vocab_size, config.n_routed_experts)
    check_range("--prompts", args.prompts, 1, MOST_PROMPTS)
    check_range("--prompt-tokens", args.prompt_tokens, 1, config.max_position_embeddings)
    check_range("--new-tokens", args.new_tokens, LEAST_OUTPUT, config.max_position_embeddings - args.prompt_tokens)
    params = SamplingParams(args.new_tokens, args.temperature, args.top_p, flags.seed, config.eos_token_id)
    tokenizer = TextTokenizer.load(args.checkpoint, config.vocab_size)
    documents = [tokenizer.encode(_read(path)) for path in args.text]
    prompts = PromptCuts(documents, args.prompts, args.prompt_tokens, flags.seed, tokenizer.bos_id)
    engine = engine_flags(args)
    task = Task(args.checkpoint, prompts, Writer(params, engine.batch or BATCH, engine), args.out)
    if args.out.exists() and not args.out.is_dir():
        raise FlagError(f"--out is {str(args.out)!r}, allowed: a folder, or one that can be made")
    resume_point(args.out, prompts, task.writer)
    return task


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_TEXT_BYTES:
            raise FlagError(f"--text {path} has {path.stat().st_size} bytes, allowed: {MOST_TEXT_BYTES}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise FlagError(f"--text {path}: {problem}") from problem


def run(groups: Groups, task: Task, flags: RunFlags) -> None:
    """One rank's part: load, write, and on world rank 0 tell."""
    if groups.topology.world > 1:
        try_exchanges(groups)
    with named_stage("load"):
        model = load_model(groups, task.directory, flags)
    out = people(flags.json)

    def tell(progress: Progress) -> None:
        rate = progress.tokens / progress.seconds
        print(f"{progress.prompts} of {progress.of} prompts, {rate:.0f} tokens/s", file=out, flush=True)

    with named_stage("step", lambda: model.clock.current):
        lines = continuations(model, task.prompts, task.writer, task.out, tell)
    if groups.rank == 0:
        path = task.out / FILE_NAME
        write_json(flags.json, {"file": str(path), "lines": lines, "prompts": len(task.prompts)})
        print(f"{path}: {lines} lines", file=out)


if __name__ == "__main__":
    sys.exit(main())
