"""Train the bundled sample and write it: `python -m meshspark.launch.make_sample`."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch

from .sample_data import is_held_out, sample_config, source_files, token_stream, train_tokenizer
from .sample_train import Trainer, TrainSettings

SAVE_SECONDS = 180.0
VALIDATE_STEPS = 300


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


def train(work: Path, settings: TrainSettings, log_every: int) -> Trainer:
    """Train until the time budget is used up or a signal comes; resumes what the work folder holds."""
    stop = _Stop()
    stream, held_out = prepare(work)
    trainer = Trainer(sample_config(), settings, stream)
    if (work / "state.safetensors").exists():
        trainer.restore(work)
    print(f"{len(stream)} training tokens, {len(held_out)} held out; at step {trainer.step_number}", flush=True)
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
                flush=True,
            )
        if step % VALIDATE_STEPS == 0:
            print(f"step {step} held-out loss {trainer.validate(held_out, stored=False):.3f}", flush=True)
        if time.monotonic() - saved > SAVE_SECONDS:
            trainer.save(work)
            saved = time.monotonic()
    trainer.save(work)
    return trainer


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="meshspark make-sample", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the run: state, tokenizer, loss curve")
    parser.add_argument("--minutes", type=float, default=TrainSettings.minutes, help="time budget over all runs")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--log-every", type=int, default=20, help="steps between log lines")
    parser.add_argument("--output", type=Path, default=None, help="write the checkpoint and its report here at the end")
    parser.add_argument("--docs", type=Path, default=None, help="folder of the loss curve (default: that of --output)")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    settings = TrainSettings(minutes=args.minutes)
    trainer = train(args.work, settings, args.log_every)
    if args.output is not None and trainer.progress >= 1:
        from .sample_report import write_sample

        write_sample(trainer, args.work, args.output, docs=args.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
