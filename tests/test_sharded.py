"""Sharded equals single: every topology gives the logits, ids and caches of one rank."""

import pytest
import torch
from episodes import make_model, ragged_traffic, run_traffic, single_model, twin_logits
from rank_pool import RankPools, from_bytes, to_bytes

from meshspark.layouts.bits import same_bits
from meshspark.models.selfcheck import row_independence
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

TOPOLOGIES = [(2, 1, 2), (2, 2, 2), (3, 3, 3), (4, 1, 4), (4, 2, 4), (4, 4, 4), (4, 2, 2)]
SLOW = [(8, 4, 8), (6, 3, 6)]
STEPS = 4


def preset_of(sizes: tuple[int, int, int]) -> str:
    """A shape whose groups, experts and vocabulary divide by these sizes."""
    return "tiny-thirds" if sizes[0] % 3 == 0 else "tiny"


def drive(groups: Groups, preset: str, mode: str, seed: int, gather_weights: bool) -> dict:
    """One rank's part: its group's traffic, logits of owned rows and all dumps as bytes."""
    model = make_model(groups, preset, mode)
    topology = groups.topology
    dp_rank = topology.coordinates(groups.rank).dp_rank
    idle = topology.dp > 1 and dp_rank == topology.dp - 1
    traffic = ragged_traffic(seed, dp_rank, topology.tp, model.config.vocab_size, STEPS, idle)
    result = run_traffic(model, traffic, topology.tp, seed + groups.rank, gather_weights=gather_weights)
    return {
        "dp_rank": dp_rank,
        "logits": [[request, position, to_bytes(row)] for (request, position), row in result["logits"].items()],
        "dumps": [{name: to_bytes(rows) for name, rows in dump.items()} for dump in result["dumps"]],
    }


def _agree(got: torch.Tensor, want: torch.Tensor, mode: str) -> bool:
    if mode == "float64":
        return bool((got - want).abs().max() <= 1e-10) if len(got) else True
    return same_bits(got, want)


def check(ranks: RankPools, preset: str, sizes: tuple[int, int, int], mode: str, gather_weights: bool = False) -> None:
    if mode != "float64" and not row_independence(single_model(preset, mode).config)["holds"]:
        pytest.skip("this machine's products depend on the row count")
    topology, seed = Topology(*sizes), sum(sizes)
    results = ranks.run(
        topology, "test_sharded:drive", timeout=120, preset=preset, mode=mode, seed=seed, gather_weights=gather_weights
    )
    vocab = single_model(preset, mode).config.vocab_size
    for dp_rank in range(topology.dp):
        members = [r for r in results if r["dp_rank"] == dp_rank]
        idle = topology.dp > 1 and dp_rank == topology.dp - 1
        traffic = ragged_traffic(seed, dp_rank, topology.tp, vocab, STEPS, idle)
        rows = {(r, p): from_bytes(row) for m in members for r, p, row in m["logits"]}
        ran = {(r, c) for step in traffic.steps for r, c in step}
        assert len(rows) == sum(count for _, count in ran_rows(traffic.steps)), ran
        for request, tokens in enumerate(traffic.tokens):
            want = twin_logits(preset, mode, tokens)
            mine = sorted(p for r, p in rows if r == request)
            if mine:
                got = torch.stack([rows[request, p] for p in mine])
                assert _agree(got, want[mine], mode), (dp_rank, request, (got - want[mine]).abs().max())
                assert torch.equal(got.argmax(1), want[mine].argmax(1))
        single = run_traffic(single_model(preset, mode), traffic, 1, seed)
        for member in members:
            for got_dump, want_dump in zip(member["dumps"], single["dumps"], strict=True):
                for name, want_rows in want_dump.items():
                    assert _agree(from_bytes(got_dump[name]).flatten(), want_rows.flatten(), mode), name


def ran_rows(steps: tuple) -> list:
    return [entry for step in steps for entry in step]


@pytest.mark.parametrize("sizes", TOPOLOGIES)
def test_float64_values(ranks: RankPools, sizes: tuple[int, int, int]) -> None:
    check(ranks, preset_of(sizes), sizes, "float64")


@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 2, 4), (4, 4, 4)])
def test_float32_bits(ranks: RankPools, sizes: tuple[int, int, int]) -> None:
    check(ranks, "tiny", sizes, "float32")


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 2), (4, 4, 4)])
def test_bfloat16_bits(ranks: RankPools, sizes: tuple[int, int, int]) -> None:
    check(ranks, "tiny", sizes, "bfloat16")


@pytest.mark.parametrize("mode", ["float32", "bfloat16"])
def test_weight_gather_form_has_the_same_bits(ranks: RankPools, mode: str) -> None:
    check(ranks, "tiny", (4, 4, 4), mode, gather_weights=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SLOW)
def test_more_ranks(ranks: RankPools, sizes: tuple[int, int, int], mode: str) -> None:
    check(ranks, preset_of(sizes), sizes, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", TOPOLOGIES)
def test_bits_everywhere(ranks: RankPools, sizes: tuple[int, int, int], mode: str) -> None:
    check(ranks, preset_of(sizes), sizes, mode)
