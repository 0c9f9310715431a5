"""Decode speed of the engine against transformers' generate: the same weights, prompts and threads, in one run.

Rounds alternate, so that a machine that changes speed changes both; the ratio of a round is what counts.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..launch.engine import Engine
from ..launch.flags import ALONE, FlagError, FlagParser, add_common, check_range, require_alone
from ..launch.generate import SAMPLE
from ..launch.output import people, write_json
from ..launch.requests import SamplingParams
from ..launch.worker import resolve_here, run_main
from ..models.checkpoint.loader import load_weights
from ..models.checkpoint.verify import read_config
from ..models.numerics import FLOAT32
from ..models.v4.config import V4Config
from ..models.v4.model import Model
from ..parallel.groups import Groups
from ..parallel.topology import Topology
from .peer import peer_model

LIMITS = {"prompts": 1024, "prompt_tokens": 1 << 20, "new_tokens": 1 << 20, "rounds": 10_000, "threads": 1024}
"""Number that a flag gives -> the most it may be; the least is 1."""


@dataclass(frozen=True)
class Round:
    """Tokens per second of one round, prefill included, and whether both wrote the same ids."""

    engine: float
    peer: float
    same_ids: bool


def engine_ids(model: Model, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations by the engine, all prompts at once."""
    longest = max(len(prompt) for prompt in prompts) + new_tokens
    engine = Engine(model, requests=len(prompts), max_context=longest)
    numbers = [engine.add_request(prompt, SamplingParams(max_new_tokens=new_tokens)) for prompt in prompts]
    written: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.active:
        for event in engine.step():
            written[event.request_id] += event.token_ids
    return [written[number] for number in numbers]


@torch.no_grad()
def peer_ids(net: torch.nn.Module, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations by transformers' generate; the prompts have one length."""
    batch = torch.tensor(prompts)
    written = net.generate(  # type: ignore[operator]
        batch,
        attention_mask=torch.ones_like(batch),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    ids: list[list[int]] = written[:, batch.shape[1] :].tolist()
    return ids


def run_rounds(
    model: Model, net: torch.nn.Module, prompts: Sequence[list[int]], new_tokens: int, rounds: int
) -> list[Round]:
    """One warm-up round that is not counted, then `rounds` that are."""
    results = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        ours = engine_ids(model, prompts, new_tokens)
        between = time.perf_counter()
        theirs = peer_ids(net, prompts, new_tokens)
        end = time.perf_counter()
        tokens = len(prompts) * new_tokens
        results.append(Round(tokens / (between - begin), tokens / (end - between), ours == theirs))
    return results[1:]


def parser() -> FlagParser:
    """The benchmark's flags."""
    flags = FlagParser(prog="meshspark bench decode", description=__doc__, allow_abbrev=False)
    flags.add_argument("--checkpoint", type=Path, default=SAMPLE, metavar="DIR", help="default: the bundled sample")
    flags.add_argument("--prompts", type=int, default=1, help="equal-length prompts at once (default: 1)")
    flags.add_argument("--prompt-tokens", type=int, default=64, help="ids of each, drawn at random (default: 64)")
    flags.add_argument("--new-tokens", type=int, default=64, help="tokens written after each prompt (default: 64)")
    flags.add_argument("--rounds", type=int, default=5, help="counted rounds (default: 5)")
    flags.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of both")
    add_common(flags, ALONE)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for wrong flags or a checkpoint that cannot be used."""
    return run_main("bench decode", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    flags = resolve_here(args)
    config = prepare(args)
    require_alone(flags, "bench decode")
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(flags.seed)
    prompts = torch.randint(2, config.vocab_size, (args.prompts, args.prompt_tokens), generator=generator).tolist()
    _, weights = load_weights(args.checkpoint, Topology(), 0, FLOAT32)
    model = Model(config, weights, Groups.single(), FLOAT32)
    rounds = run_rounds(model, _peer(config, dict(weights)), prompts, args.new_tokens, args.rounds)
    found = figures(args, rounds)
    write_json(flags.json, found)
    for name, value in found.items():
        shown = f"{value:.3f}" if isinstance(value, float) else value
        print(f"{name:22} {shown}", file=people(flags.json))
    return 0


def prepare(args: argparse.Namespace) -> V4Config:
    """The checkpoint's config, all numbers checked against it. ValueError."""
    for name, most in LIMITS.items():
        check_range(f"--{name.replace('_', '-')}", getattr(args, name), 1, most)
    path = args.checkpoint / "config.json"
    if not path.is_file():
        raise ValueError(f"--checkpoint is {str(args.checkpoint)!r}, but {path} does not exist; give a model's folder")
    config = read_config(args.checkpoint)
    positions = args.prompt_tokens + args.new_tokens
    if positions > config.max_position_embeddings:
        raise FlagError(
            f"--prompt-tokens {args.prompt_tokens} and --new-tokens {args.new_tokens} are {positions} positions, "
            f"allowed: {config.max_position_embeddings}"
        )
    return config


def _peer(config: V4Config, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    try:
        return peer_model(config, weights)
    except ImportError as problem:
        raise ValueError(f"the peer needs transformers ({problem}); pip install 'meshspark[test]'") from problem


def figures(args: argparse.Namespace, rounds: Sequence[Round]) -> dict[str, int | float | bool]:
    """What is told of the rounds: medians, and the spread of the ratio."""
    ratios = [r.engine / r.peer for r in rounds]
    return {
        "prompts": args.prompts,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "threads": args.threads,
        "engine_tokens_per_s": statistics.median(r.engine for r in rounds),
        "peer_tokens_per_s": statistics.median(r.peer for r in rounds),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "same_ids": all(r.same_ids for r in rounds),
    }


if __name__ == "__main__":
    sys.exit(main())
