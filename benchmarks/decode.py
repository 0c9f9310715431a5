"""Decode speed of the engine against transformers' generate: the same weights, prompts and threads, in one run.

Rounds alternate, so that a machine that changes speed changes both; the ratio of a round is what counts.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..launch.engine import Engine
from ..launch.generate import SAMPLE
from ..launch.requests import SamplingParams
from ..models.checkpoint.loader import load_weights
from ..models.numerics import FLOAT32
from ..models.v4.model import Model
from ..parallel.groups import Groups
from ..parallel.topology import Topology
from .peer import peer_model


@dataclass(frozen=True)
class Round:
    """Tokens per second of one round, prefill included, and whether both wrote the same ids."""

    engine: float
    peer: float
    same_ids: bool


def engine_ids(model: Model, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations by the engine, all prompts at once."""
    longest = max(len(prompt) for prompt in prompts) + new_tokens
    engine = Engine(model, slots_per_rank=len(prompts), max_context=longest)
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="meshspark bench decode", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=SAMPLE, help="checkpoint folder (default: the sample)")
    parser.add_argument("--prompts", type=int, default=1, help="equal-length prompts at once")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="ids of each prompt, drawn at random")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens written after each prompt")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of both")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    config, weights = load_weights(args.checkpoint, Topology(), 0, FLOAT32)
    model = Model(config, weights, Groups.single(), FLOAT32)
    net = peer_model(config, dict(weights))
    generator = torch.Generator().manual_seed(args.seed)
    prompts = torch.randint(2, config.vocab_size, (args.prompts, args.prompt_tokens), generator=generator).tolist()
    rounds = run_rounds(model, net, prompts, args.new_tokens, args.rounds)
    ratios = [r.engine / r.peer for r in rounds]
    figures = {
        "schema": 1,
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
    for name, value in figures.items():
        print(f"{name:22} {value:.3f}" if isinstance(value, float) else f"{name:22} {value}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
