"""The model against two goldens that share no code with it: transformers in FP32 and a naive FP64 forward."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from golden_cases import LENGTHS, golden_configs, golden_prompts, golden_weights
from golden_transformers import golden_generate, golden_logits, golden_model
from naive_v4 import Naive, naive_forward

import meshspark
from meshspark.layouts.rows import RequestRows
from meshspark.models.checkpoint.loader import load_weights
from meshspark.models.checkpoint.synthetic import random_weights
from meshspark.models.numerics import FLOAT32, FLOAT64
from meshspark.models.v4.caches import poison
from meshspark.models.v4.config import V4Config
from meshspark.models.v4.model import Model, Tap
from meshspark.models.v4.pools import CacheShape
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

SAMPLE = Path(meshspark.__file__).parent / "models" / "sample"
NAMES = (*golden_configs(), "sample")
"""The random shapes and the bundled model, whose trained weights make scores that random ones never do."""
NEAR_TIE = 1e-5
Step = list[tuple[int, int, int]]
"""The rows of one step: (prompt, first position, end)."""


@dataclass(frozen=True)
class Golden:
    """One shape with its prompts and what both goldens say about them."""

    config: V4Config
    weights: dict[str, torch.Tensor]
    prompts: list[list[int]]
    naive: list[Naive]
    peer: list[torch.Tensor]
    net: torch.nn.Module


@functools.cache
def golden(name: str) -> Golden:
    if name == "sample":
        config, held = load_weights(SAMPLE, Topology(), 0, FLOAT32)
        weights = dict(held)
    else:
        config = golden_configs()[name]
        weights = golden_weights(config, FLOAT32)
    prompts = golden_prompts(config)
    net = golden_model(config, weights)
    naive = [naive_forward(config, weights, prompt) for prompt in prompts]
    return Golden(config, weights, prompts, naive, [golden_logits(net, p) for p in prompts], net)


def fp32_model(name: str) -> Model:
    return Model(golden(name).config, dict(golden(name).weights), Groups.single(), FLOAT32)


def settled_rows(naive: Naive) -> int:
    """Rows before the first whose index choice is within rounding noise: it and all later ones may differ."""
    near = (naive.index_gap < NEAR_TIE).nonzero().flatten().tolist()
    return near[0] if near else len(naive.index_gap)


def assert_close(ours: torch.Tensor, golden_rows: torch.Tensor, rows: int, what: str) -> None:
    assert ours.shape == golden_rows.shape, f"{what}: {tuple(ours.shape)} rows against {tuple(golden_rows.shape)}"
    if rows == 0:
        return
    tolerance = 2e-5 * max(1.0, float(golden_rows.abs().max()))
    worst_S = (ours[:rows] - golden_rows[:rows]).abs().amax(1)
    row = int(worst_S.argmax())
    assert worst_S[row] <= tolerance, f"{what}: row {row} is off by {float(worst_S[row]):.2e}, allowed {tolerance:.2e}"


def test_few_rows_are_skipped_for_near_ties() -> None:
    rows, skipped = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
    for name in NAMES:
        for naive in golden(name).naive:
            rows[name] += len(naive.index_gap)
            skipped[name] += len(naive.index_gap) - settled_rows(naive)
    assert all(skipped[name] <= 0.05 * rows[name] for name in NAMES), skipped
    assert sum(skipped.values()) <= 0.01 * sum(rows.values()), skipped


@pytest.mark.parametrize("name", NAMES)
def test_naive_agrees_with_peer(name: str) -> None:
    case = golden(name)
    for naive, peer in zip(case.naive, case.peer, strict=True):
        assert_close(naive.logits.float(), peer, settled_rows(naive), f"{name}, {len(peer)} tokens, naive")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_whole_prompt_equals_peer(name: str, length: int) -> None:
    case, at = golden(name), LENGTHS.index(length)
    model = fp32_model(name)
    logits = model.forward(model.plan_sequences([case.prompts[at]])).logits
    assert logits is not None and logits.dtype == torch.float32
    assert_close(logits, case.peer[at], settled_rows(case.naive[at]), f"{name}, {length} tokens in one go")


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_packed_prompts_equal_peer(name: str) -> None:
    case, model = golden(name), fp32_model(name)
    logits = model.forward(model.plan_sequences(case.prompts)).logits
    assert logits is not None
    for ours, peer, naive in zip(logits.split(list(LENGTHS)), case.peer, case.naive, strict=True):
        assert_close(ours, peer, settled_rows(naive), f"{name}, {len(peer)} tokens among others")


def lockstep(schedules: Sequence[Sequence[int]]) -> Iterator[Step]:
    """Steps in which each prompt brings its next chunk; a schedule lists the prompt's chunk lengths."""
    done = [0] * len(schedules)
    for turn in range(max(len(s) for s in schedules)):
        step = []
        for prompt, schedule in enumerate(schedules):
            if turn < len(schedule):
                step.append((prompt, done[prompt], done[prompt] + schedule[turn]))
                done[prompt] += schedule[turn]
        yield step


def run_steps(model: Model, prompts: Sequence[Sequence[int]], schedules: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits [S, V] of each prompt, computed chunk by chunk through caches; one row alone counts as a decode."""
    longest = max(max(schedule) for schedule in schedules)
    caches = model.make_caches(CacheShape(len(prompts), max(LENGTHS) + 4, longest))
    poison(caches)
    for slot, prompt in enumerate(prompts):
        caches.admit(slot, len(prompt))
    rows: list[dict[int, torch.Tensor]] = [{} for _ in prompts]
    for step in lockstep(schedules):
        requests = [
            RequestRows(
                slot,
                start,
                prompts[slot][start:end],
                kind="decode" if end - start == 1 and start > 0 else "prefill",
                asked=range(end - start),
            )
            for slot, start, end in step
        ]
        out = model.forward(model.plan(requests, caches), caches)
        assert out.logits is not None and len(out.owned) == len(out.logits)
        for (request, offset), logits_V in zip(out.owned, out.logits, strict=True):
            slot, start, _ = step[request]
            assert start + offset not in rows[slot]
            rows[slot][start + offset] = logits_V
    caches.check_integrity()
    return [torch.stack([rows[slot][p] for p in range(len(prompt))]) for slot, prompt in enumerate(prompts)]


def ragged(length: int, seed: int, most: int) -> list[int]:
    """Chunk lengths from 1 to `most` that add up to `length`."""
    generator = torch.Generator().manual_seed(seed)
    chunks: list[int] = []
    while sum(chunks) < length:
        chunk = int(torch.randint(1, most + 1, (), generator=generator))
        chunks.append(min(chunk, length - sum(chunks)))
    return chunks


def compare_steps(name: str, schedules: Sequence[Sequence[int]], how: str) -> None:
    case = golden(name)
    with torch.no_grad():
        ours = run_steps(fp32_model(name), case.prompts, schedules)
    for logits, peer, naive in zip(ours, case.peer, case.naive, strict=True):
        assert_close(logits, peer, settled_rows(naive), f"{name}, {len(peer)} tokens {how}")


@pytest.mark.parametrize("name", NAMES)
def test_ragged_chunks_equal_peer(name: str) -> None:
    compare_steps(name, [ragged(n, seed=n, most=45) for n in LENGTHS], "in ragged chunks")


@pytest.mark.parametrize("name", NAMES)
def test_decode_across_boundaries_equals_peer(name: str) -> None:
    """Prefill up to just before an entry of ratio 128 completes, then token by token."""
    singles = {1: 1, 3: 3, 4: 4, 5: 5, 127: 5, 128: 9, 129: 14, 300: 50}
    schedules = [[1] * n if n == singles[n] else [n - singles[n], *[1] * singles[n]] for n in LENGTHS]
    compare_steps(name, schedules, "token by token")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_equals_peer(name: str) -> None:
    compare_steps(name, [[1] * n for n in LENGTHS], "token by token from the start")


@pytest.mark.slow
@pytest.mark.parametrize("most", [2, 5, 9, 130])
@pytest.mark.parametrize("name", NAMES)
def test_other_ragged_chunks_equal_peer(name: str, most: int) -> None:
    compare_steps(name, [ragged(n, seed=1000 * most + n, most=most) for n in LENGTHS], f"in chunks up to {most}")


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_fp64_equals_naive(name: str) -> None:
    """Logits and every layer's streams, all prompts at once: only the order of additions may differ."""
    case = golden(name)
    weights = {k: w.double() if w.is_floating_point() else w for k, w in case.weights.items()}
    model = Model(case.config, weights, Groups.single(), FLOAT64)
    taps = [Tap(layer, "streams") for layer in range(case.config.num_hidden_layers)]
    out = model.forward(model.plan_sequences(case.prompts), taps=taps)
    assert out.logits is not None and out.logits.dtype == torch.float64
    torch.testing.assert_close(out.logits, torch.cat([n.logits for n in case.naive]), atol=1e-10, rtol=0)
    for layer, tap in enumerate(taps):
        expected = torch.cat([n.streams[layer] for n in case.naive])
        torch.testing.assert_close(out.taps[tap], expected, atol=1e-10, rtol=0)


@torch.no_grad()
def test_greedy_decode_equals_peer() -> None:
    """Closed loop: each side feeds itself, the peer through its own cache."""
    case, model, prompt = (
        golden("all_entries"),
        fp32_model("all_entries"),
        golden_prompts(golden_configs()["window8"])[4],
    )
    expected = golden_generate(case.net, prompt, 12)
    caches = model.make_caches(CacheShape(1, len(prompt) + 12, len(prompt)))
    caches.admit(0, len(prompt) + 12)
    tokens = list(prompt)
    rows = RequestRows(0, 0, tokens, asked=[len(tokens) - 1])
    for _ in range(12):
        logits = model.forward(model.plan([rows], caches), caches).logits
        assert logits is not None
        tokens.append(int(logits[-1].argmax()))
        rows = RequestRows(0, len(tokens) - 1, tokens[-1:], kind="decode", asked=[0])
    assert tokens[len(prompt) :] == expected


def test_exact_ties_of_index_scores_go_to_the_lower_entry() -> None:
    """With one index head a relu makes many scores exactly zero; transformers leaves such ties to its sort."""
    config = replace(golden_configs()["window8"], index_n_heads=1)
    weights = random_weights(config, 3, FLOAT64)
    prompt = torch.randint(2, config.vocab_size, (150,), generator=torch.Generator().manual_seed(4)).tolist()
    naive = naive_forward(config, weights, prompt)
    assert bool((naive.index_gap == 0).any()), "the case has ties at the cut"
    model = Model(config, dict(weights), Groups.single(), FLOAT64)
    with torch.no_grad():
        logits = model.forward(model.plan_sequences([prompt])).logits
    assert logits is not None
    torch.testing.assert_close(logits, naive.logits, rtol=0, atol=1e-10)
