"""What numerics cost in quality: held-out loss of the sample, agreement of the best token, and KL against float32.

The text is the part of Python's standard library that the sample was not trained on.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table
from tokenizers import Tokenizer

from ..launch.flags import STANDARD_OUTPUT, FlagParser, check_json, check_range
from ..launch.generate import SAMPLE
from ..launch.output import people, show, write_json
from ..launch.sample_data import is_held_out, source_files, token_stream
from ..launch.worker import run_main
from ..models.checkpoint.loader import load_weights
from ..models.checkpoint.verify import read_config
from ..models.numerics import MODES, numerics
from ..models.v4.model import Model
from ..parallel.groups import Groups
from ..parallel.topology import Topology

REFERENCE = "float32"
LIMITS = {"windows": 512, "length": 4096}


@dataclass(frozen=True)
class Quality:
    """Mean over all scored tokens: loss in nats, share of rows whose best token is float32's, KL(float32 || this)."""

    numerics: str
    tokens: int
    loss: float
    top1: float
    kl: float


def windows_of(stream: torch.Tensor, count: int, length: int) -> list[list[int]]:
    """`count` windows of length + 1 ids, evenly spaced over the stream. ValueError where it is too short."""
    room = len(stream) - length - 1
    if room < count - 1:
        raise ValueError(f"the held-out text has {len(stream)} tokens, allowed: at least {length + count}")
    return [stream[i * room // max(1, count - 1) :][: length + 1].tolist() for i in range(count)]


@torch.inference_mode()
def log_probabilities(model: Model, window: Sequence[int]) -> torch.Tensor:
    """FP64 [length, V] of the tokens behind each row of one window."""
    logits = model.forward(model.plan_sequences([window[:-1]])).logits
    assert logits is not None
    return torch.log_softmax(logits.double(), dim=1)


def compare(model: Model, expected: Sequence[torch.Tensor], windows: Sequence[Sequence[int]]) -> Quality:
    """A model against the reference's log probabilities of every window."""
    loss = top1 = kl = 0.0
    for window, want_LV in zip(windows, expected, strict=True):
        got_LV = log_probabilities(model, window)
        after = torch.tensor(window[1:])
        loss -= got_LV.gather(1, after[:, None]).sum().item()
        top1 += (got_LV.argmax(1) == want_LV.argmax(1)).sum().item()
        kl += (want_LV.exp() * (want_LV - got_LV)).sum().item()
    tokens = sum(len(window) - 1 for window in windows)
    return Quality(model.numerics.name, tokens, loss / tokens, top1 / tokens, kl / tokens)


def parser() -> FlagParser:
    """The benchmark's flags."""
    flags = FlagParser(prog="meshspark bench quality", description=__doc__, allow_abbrev=False)
    flags.add_argument("--checkpoint", type=Path, default=SAMPLE, metavar="DIR", help="default: the bundled sample")
    flags.add_argument("--windows", type=int, default=16, help="pieces of held-out text (default: 16)")
    flags.add_argument("--length", type=int, default=512, help="tokens scored in each (default: 512)")
    flags.add_argument(
        "--numerics", nargs="+", choices=sorted(MODES), default=["float32", "bfloat16", "w8a8"], metavar="MODE"
    )
    flags.add_argument("--json", nargs="?", const=STANDARD_OUTPUT, metavar="FILE", help="write JSON")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for wrong flags or a checkpoint that cannot be used."""
    return run_main("bench quality", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    for name, most in LIMITS.items():
        check_range(f"--{name}", getattr(args, name), 1, most)
    check_json(args.json)
    results = measure(args)
    write_json(args.json, {"rows": [asdict(result) for result in results]})
    table = Table("numerics", "loss (nats)", f"best token as {REFERENCE}", f"KL from {REFERENCE} (nats)")
    for each in results:
        table.add_row(each.numerics, f"{each.loss:.4f}", f"{100 * each.top1:.2f} %", f"{each.kl:.6f}")
    table.title, table.title_justify = f"{results[0].tokens:,} held-out tokens", "left"
    show(people(args.json), table)
    return 0


def measure(args: argparse.Namespace) -> list[Quality]:
    """One line for each of the numerics asked for."""
    config = read_config(args.checkpoint)
    file = args.checkpoint / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"--checkpoint is {str(args.checkpoint)!r}, but {file} does not exist; text needs a tokenizer")
    if args.length >= config.max_position_embeddings:
        raise ValueError(f"--length is {args.length}, allowed: below the model's {config.max_position_embeddings}")
    texts = [text for name, text in source_files() if is_held_out(name)]
    windows = windows_of(token_stream(Tokenizer.from_file(str(file)), texts, config), args.windows, args.length)
    reference = _model(args.checkpoint, REFERENCE)
    expected = [log_probabilities(reference, window) for window in windows]
    return [compare(_model(args.checkpoint, name), expected, windows) for name in args.numerics]


def _model(checkpoint: Path, name: str) -> Model:
    config, weights = load_weights(checkpoint, Topology(), 0, numerics(name))
    return Model(config, weights, Groups.single(), numerics(name))


if __name__ == "__main__":
    sys.exit(main())
