"""The fixtures of transports: they pass on every number of ranks and both transports, and see every planted fault."""

import re
from unittest import mock

import pytest
import torch

from meshspark.comm import agreement, context_gather, experts, logits, projection
from meshspark.launch.fixture import verdict_of
from meshspark.launch.fixtures import transports_context
from meshspark.launch.fixtures.harness import (
    Options,
    Run,
    run_fixture,
)
from meshspark.launch.fixtures.origin import poison
from meshspark.launch.fixtures.transports import FIXTURES
from meshspark.parallel.topology import Topology

BY_NAME = {fixture.name: fixture for fixture in FIXTURES}
KINDS = ("kv", "hca", "csa-main", "csa-aux")
TRANSPORTS = ("local", "torch")


def run_all(groups, runs):
    """Every run must pass, with something compared in every output; one rank alone may have nothing to exchange."""
    for name, options in runs:
        rows = run_fixture(BY_NAME[name], Run(groups, Options(**options)))
        assert verdict_of(rows) == "passed", (name, options, rows)
        assert groups.topology.world == 1 or all(row.compared for row in rows), (name, options, rows)


CONTEXT = [
    ("cp-allgather", {"payload_kind": kind, "raw_bits": raw, "local_t": 17, "epochs": 3})
    for kind in KINDS
    for raw in (False, True)
]
SMALL = [
    ("publish", {"mode": "collectives", "case": "subcapacity", "local_t": 17}),
    *(("experts", {"skew": skew, "local_t": 17}) for skew in ("uniform", "hot", "one", "empty")),
    ("logits", {"local_t": 5}),
    ("agreement", {"epochs": 5}),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("runs", [CONTEXT, SMALL], ids=["context", "small"])
def test_every_fixture_passes(ranks, world, transport, runs):
    ranks.run(Topology(world, world, world), "test_fixtures_transports:run_all", 120, transport=transport, runs=runs)


def test_two_tensor_groups_of_one_expert_group(ranks):
    ranks.run(Topology(4, 2, 4), "test_fixtures_transports:run_all", 120, runs=CONTEXT[:3] + SMALL)


@pytest.mark.parametrize(("world", "transport"), [(1, "torch"), (2, "local"), (2, "torch")])
def test_full_bands_and_weights(ranks, world, transport):
    """Default sizes: bands of 128 rows, the whole output projection."""
    runs = [("cp-allgather", {}), ("weight-gather", {}), ("publish", {"mode": "collectives"})]
    runs += [("publish", {"mode": "sharded", "case": "subcapacity", "local_t": 5})] * (transport == "local")
    ranks.run(Topology(world, world, world), "test_fixtures_transports:run_all", 200, transport=transport, runs=runs)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_full_bands_and_weights_on_four_ranks(ranks, transport):
    runs = [(name, {}) for name in BY_NAME]
    ranks.run(Topology(4, 4, 4), "test_fixtures_transports:run_all", 280, transport=transport, runs=runs)


# Plants: what a faulty transport would have done to the result of the exchange, on the last rank only.


def swap(result, before):
    """The bands of the first two ranks change places."""
    half = result.shape[0] // 2
    return torch.cat([result[half:], result[:half]])


def stale(result, before):
    """The first half is what the epoch before brought."""
    if before is None:
        return result
    half = result.shape[0] // 2
    return torch.cat([before[:half], result[half:]])


def shift(result, before):
    """Every row of the first half stands one further."""
    half = result.shape[0] // 2
    return torch.cat([result[:half].roll(1, 0), result[half:]])


def shift_columns(result, before):
    """Every element stands one further in its row."""
    return result.reshape(result.shape[0], -1).roll(1, 1).view(result.shape)


def quieten(result, before):
    """A numeric conversion on the way: NaN payloads are lost."""
    return result.float().bfloat16() if result.dtype == torch.bfloat16 else result


def zero_tail(result, before):
    """The last row never arrives."""
    return torch.cat([result[:-1], torch.zeros_like(result[-1:])])


def unwritten(result, before):
    """The last row stays as the memory was."""
    return torch.cat([result[:-1], poison(torch.empty_like(result[-1:]))])


def narrow(result, before):
    """Partial sums travel in BF16."""
    return result.bfloat16().float() if result.dtype == torch.float32 else result


PLANTS = {f.__name__: f for f in (swap, stale, shift, shift_columns, quieten, zero_tail, unwritten, narrow)}
MODULES = {m.__name__.split(".")[-1]: m for m in (agreement, context_gather, experts, logits, projection)}


def planted(groups, name, options, where, plant, stage):
    """[output, verdict, detail] of every row, while the exchange `where` is faulty on the last rank."""
    module, function = where.split(".")
    original = getattr(MODULES[module], function)
    before = []

    def faulty(x, *arguments, **keywords):
        result = original(x, *arguments, **keywords)
        if groups.rank != groups.topology.world - 1 or not re.search(stage, keywords["stage"]):
            return result
        before.append(result)
        # Of the epoch before: the last result of this shape.
        older = [r for r in before[:-1] if r.shape == result.shape and r.dtype == result.dtype]
        return PLANTS[plant](result, older[-1] if older else None)

    with mock.patch.object(MODULES[module], function, faulty):
        rows = run_fixture(BY_NAME[name], Run(groups, Options(**options)))
    return [[row.output, row.verdict, row.detail] for row in rows]


RAW = {"payload_kind": "kv", "raw_bits": True, "local_t": 17}
GATHER = "context_gather.all_gather_rows"
CASES = [
    ("cp-allgather", RAW, GATHER, "swap", "", r"epoch 1 kv", r"came from rank 1, epoch 1, row 0, column \d, .*swapped"),
    ("cp-allgather", RAW, GATHER, "stale", "", r"epoch 2 kv", r"from rank 0, epoch 1, row 0, column \d, .*: stale \("),
    ("cp-allgather", RAW, GATHER, "stale", "", r"epoch 2 kv cache", "wanted"),
    ("cp-allgather", RAW, GATHER, "shift", "", r"epoch 1 kv", r"came from rank 0, epoch 1, row 16, .*: shifted"),
    ("cp-allgather", RAW, GATHER, "shift_columns", "", r"epoch 1 kv", r"column 1 came from .* column 0, .*shifted"),
    ("cp-allgather", RAW, GATHER, "quieten", "", r"epoch 1 kv", "lost the payload of its NaN"),
    ("cp-allgather", RAW, GATHER, "zero_tail", "", r"epoch 1 kv", "row 33, column 0 is zero"),
    ("cp-allgather", RAW, GATHER, "unwritten", "", r"epoch 1 kv", "row 33, column 0 was never written"),
    ("cp-allgather", {"local_t": 17}, GATHER, "swap", "", "epoch 1 value", "swapped"),
    ("publish", {"mode": "collectives"}, "projection.exchange_rows", "swap", "", "epoch 1 heads", "swapped"),
    ("publish", {"mode": "collectives"}, "projection.exchange_rows", "stale", "", "epoch 2 heads", "stale"),
    ("publish", {"mode": "collectives"}, "projection.exchange_rows", "narrow", "", "epoch 1 sums", "wanted"),
    ("publish", {"mode": "collectives"}, "projection.exchange_rows", "shift", "", "epoch 1 sums", "wanted"),
    ("publish", {"mode": "sharded"}, "projection.exchange_rows", "zero_tail", "", "epoch 1 projection", "wanted"),
    ("weight-gather", {}, "projection.all_gather_rows", "shift_columns", "", "epoch 1 wo_b", "shifted"),
    (
        "experts",
        {"local_t": 17},
        "experts.exchange_rows",
        "shift",
        r"^dispatch",
        "epoch 1 bfloat16 x",
        "came from rank",
    ),
    # All rows at the same experts: both epochs have the same counts.
    ("experts", {"skew": "one"}, "experts.exchange_rows", "stale", "^dispatch", "epoch 2 int8 x", "stale"),
    ("experts", {"local_t": 17}, "experts.exchange_rows", "shift", "combine", "epoch 1 int8 combined", "shifted"),
    ("experts", {"local_t": 17}, "experts.exchange_rows", "quieten", "combine", "epoch 1 int8 combined", "payload"),
    ("logits", {"local_t": 5}, "logits.all_gather_rows", "swap", "", "epoch 1 asked", "swapped"),
    ("logits", {"local_t": 5}, "logits.exchange_rows", "swap", "", "epoch 1 logits", "swapped"),
    ("logits", {"local_t": 5}, "logits.exchange_rows", "stale", "", "epoch 2 best ids", "wanted"),
    ("agreement", {}, "agreement.all_gather_rows", "swap", "", "epoch 1 records", "swapped"),
    ("agreement", {}, "agreement.all_gather_rows", "stale", "", "epoch 2 records", "stale"),
]


def _options(name, options):
    shorter = {"case": "subcapacity", "local_t": 5} if name == "publish" else {}
    return {**options, **shorter}


@pytest.mark.parametrize(("name", "options", "where", "plant", "stage", "output", "says"), CASES)
def test_a_planted_fault_is_seen_and_named(ranks, name, options, where, plant, stage, output, says):
    kwargs = {"name": name, "options": _options(name, options), "where": where, "plant": plant, "stage": stage}
    answers = ranks.run(Topology(2, 2, 2), "test_fixtures_transports:planted", 120, **kwargs)
    assert answers[0] == answers[1], "all ranks know the same verdicts"
    found = [detail for label, verdict, detail in answers[0] if label == output and verdict == "failed"]
    assert len(found) == 1, answers[0]
    assert found[0].startswith("rank 1: ") and re.search(says, found[0]), found[0]


def ties_upwards(groups):
    """Ties between shards go to the highest id."""

    def faulty(ids_SM, values_SM):
        best_M = values_SM.amax(dim=0)
        ids_M = torch.where(values_SM == best_M, ids_SM, -1).amax(dim=0)
        return torch.where(best_M.isnan(), -1, ids_M), best_M

    with mock.patch.object(logits, "_best_of_shards", faulty):
        rows = run_fixture(BY_NAME["logits"], Run(groups, Options(local_t=5)))
    return {row.output: row.verdict for row in rows}


def test_ties_that_go_upwards_are_seen(ranks):
    verdicts = ranks.run(Topology(2, 2, 2), "test_fixtures_transports:ties_upwards")[0]
    assert verdicts["epoch 1 best ids"] == "failed"
    assert verdicts["epoch 1 best values"] == "passed"


def old_message(groups):
    """The last rank reads the control message of the epoch before."""
    original, told = agreement.broadcast_bytes, []

    def faulty(*arguments, **keywords):
        told.append(original(*arguments, **keywords))
        return told[0] if groups.rank == groups.topology.world - 1 else told[-1]

    with mock.patch.object(agreement, "broadcast_bytes", faulty):
        rows = run_fixture(BY_NAME["agreement"], Run(groups))
    return {row.output: row.detail for row in rows if row.verdict == "failed"}


def test_an_old_control_message_is_seen(ranks):
    (failed,) = {tuple(found.items()) for found in ranks.run(Topology(2, 2, 2), "test_fixtures_transports:old_message")}
    assert [name for name, _ in failed] == ["epoch 2 control"]


def scribble(groups):
    """The exchange writes behind the rows that it was given, into the tail of the buffer."""
    original = transports_context.gather_context

    def faulty(tensors, *arguments, **keywords):
        result = original(tensors, *arguments, **keywords)
        for tensor in tensors.values():
            behind = tensor.as_strided((1,), (1,), tensor.storage_offset() + tensor.numel())
            behind.fill_(1)
        return result

    with mock.patch.object(transports_context, "gather_context", faulty):
        rows = run_fixture(BY_NAME["cp-allgather"], Run(groups, Options(local_t=17)))
    return {row.output: row.verdict for row in rows}


def test_a_write_behind_the_rows_is_seen(ranks):
    verdicts = ranks.run(Topology(2, 2, 2), "test_fixtures_transports:scribble")[0]
    assert verdicts["epoch 1 canaries"] == "failed"
    assert verdicts["epoch 1 value"] == "passed"
