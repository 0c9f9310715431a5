"""Train the bundled sample and write it: `python -m meshspark.launch.make_sample`."""

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch

from .flags import ALONE, FlagError, FlagParser, add_common, check_range, require_alone
from .output import people, write_json
from .sample_data import is_held_out, sample_config, source_files, token_stream, train_tokenizer
from .sample_train import Trainer, TrainSettings
from .worker import resolve_here, run_main

SAVE_SECONDS = 180.0
VALIDATE_STEPS = 300
LEAST_MINUTES, MOST_MINUTES = 0.01, 1e6
MOST_THREADS, MOST_STEPS = 1024, 1_000_000


class _Stop:
    """Set by SIGTERM and SIGINT: the run saves and ends after its step."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def prepare(work: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(training stream, held-out stream); the tokenizer is trained once and kept in the work folder."""
    from tokenizers import Tokenizer

    files = list(source_files())
    texts = [text for name, text in files if not is_held_out(name)]
    held_out = [text for name, text in files if is_held_out(name)]
    path = work / "tokenizer.json"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        train_tokenizer(texts).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    config = sample_config()
    return token_stream(tokenizer, texts, config), token_stream(tokenizer, held_out, config)


def check_seed(work: Path, seed: int) -> None:
    """FlagError if the work folder's run was begun with another seed; a new run's is noted there."""
    path = work / "seed.json"
    if not (work / "state.safetensors").exists():
        work.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(seed), encoding="utf-8")
    # Runs without a note are of the default seed.
    begun = json.loads(path.read_text(encoding="utf-8")) if path.exists() else TrainSettings.seed
    if begun != seed:
        raise FlagError(f"--seed is {seed}, but the run in {work} was begun with {begun!r}; allowed: that one")


def train(work: Path, settings: TrainSettings, log_every: int, out: TextIO) -> Trainer:
    """Train until the time budget is used up or a signal comes; resumes what the work folder holds."""
    stop = _Stop()
    stream, held_out = prepare(work)
    trainer = Trainer(sample_config(), settings, stream)
    if (work / "state.safetensors").exists():
        trainer.restore(work)
    print(
        f"{len(stream)} training tokens, {len(held_out)} held out; at step {trainer.step_number}", file=out, flush=True
    )
    saved = time.monotonic()
    while trainer.progress < 1 and not stop.asked:
        trainer.step()
        step = trainer.step_number
        if step % log_every == 0:
            recent = [loss for _, loss in trainer.curve[-log_every:]]
            tokens = step * settings.sequences * settings.length
            print(
                f"step {step} loss {sum(recent) / len(recent):.3f} rate {trainer.rate():.3f} "
                f"tokens/s {tokens / trainer.seconds:.0f} done {trainer.progress:.1%}",
                file=out,
                flush=True,
            )
        if step % VALIDATE_STEPS == 0:
            loss = trainer.validate(held_out, stored=False)
            print(f"step {step} held-out loss {loss:.3f}", file=out, flush=True)
        if time.monotonic() - saved > SAVE_SECONDS:
            trainer.save(work)
            saved = time.monotonic()
    trainer.save(work)
    return trainer


def parser() -> FlagParser:
    """The verb's flags."""
    flags = FlagParser(prog="meshspark make-sample", description=__doc__, allow_abbrev=False)
    flags.add_argument("--work", type=Path, required=True, help="folder of the run: state, tokenizer, loss curve")
    flags.add_argument(
        "--minutes", type=float, default=TrainSettings.minutes, help="budget over all runs (default: %(default)s)"
    )
    flags.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    flags.add_argument("--log-every", type=int, default=20, help="steps between log lines (default: 20)")
    flags.add_argument("--output", type=Path, default=None, help="write the checkpoint and its report here at the end")
    flags.add_argument("--docs", type=Path, default=None, help="folder of the loss curve (default: that of --output)")
    add_common(flags, ALONE)
    # The bundled sample was made with this one.
    flags.set_defaults(seed=TrainSettings.seed)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for wrong flags or a folder that cannot be used."""
    return run_main("make-sample", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    flags = resolve_here(args)
    require_alone(flags, "make-sample")
    check_range("--minutes", args.minutes, LEAST_MINUTES, MOST_MINUTES)
    check_range("--threads", args.threads, 1, MOST_THREADS)
    check_range("--log-every", args.log_every, 1, MOST_STEPS)
    if args.docs is not None and args.output is None:
        raise FlagError(f"--docs is {str(args.docs)!r}, but without --output no loss curve is written; give both")
    try:
        check_seed(args.work, flags.seed)
    except OSError as problem:
        raise ValueError(f"--work is {str(args.work)!r}, which cannot be used: {problem}") from problem
    torch.set_num_threads(args.threads)
    settings = TrainSettings(minutes=args.minutes, seed=flags.seed)
    trainer = train(args.work, settings, args.log_every, people(flags.json))
    written = args.output is not None and trainer.progress >= 1
    if written:
        from .sample_report import write_sample

        write_sample(trainer, args.work, args.output, docs=args.docs)
    write_json(flags.json, summary(trainer, written))
    return 0


def summary(trainer: Trainer, written: bool) -> dict[str, Any]:
    """The result for --json, but for its schema."""
    return {
        "step": trainer.step_number,
        "seconds": trainer.seconds,
        "progress": trainer.progress,
        "loss": trainer.curve[-1][1] if trainer.curve else None,
        "written": written,
    }


if __name__ == "__main__":
    sys.exit(main())
