"""Everything that moves rows keeps the rules of NCCL and HCCL, as far as a stand-in on the CPU can tell."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import test_collectives
import test_context_gather
import test_experts
import test_logits
import test_projection
import torch
import torch.distributed as dist
from episodes import full_weights, ragged_traffic, run_traffic, single_model, twin_logits
from rank_pool import RankPools, from_bytes, to_bytes
from strict_backend import FLAVOURS, Flavour, Refused, Stand, on_device, stand_in
from test_engine import run, traffic

from meshspark.comm import backend, collectives, context_gather, experts, logits, projection
from meshspark.comm.connect import Connections, Wish
from meshspark.launch.engine import Engine
from meshspark.launch.exchange import try_exchanges
from meshspark.launch.fixture import registry
from meshspark.launch.fixtures.harness import PASSED, Options, Run, run_fixture
from meshspark.models.checkpoint.share import shard_weights
from meshspark.models.numerics import numerics
from meshspark.models.v4.config import PRESETS
from meshspark.models.v4.model import Model
from meshspark.parallel.errors import CommError
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

CPU = torch.device("cpu")
SECONDS = 30.0
STEPS = 2


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[RankPools]:
    """Ranks of these tests alone: they end the groups that they were started with."""
    pools = RankPools()
    yield pools
    pools.kill()


@contextmanager
def device_groups(base: Groups, flavour: Flavour, topology: Topology, folder: str) -> Iterator[tuple[Groups, Stand]]:
    """Groups on a device of this flavour, started as a program on a device starts them."""
    base.close()
    with stand_in(flavour) as stand:
        store = dist.FileStore(str(Path(folder) / f"{flavour.name} {topology}"), topology.world)
        groups = Groups.start(
            topology,
            rank=base.rank,
            backend=flavour.name,
            device=flavour.device,
            timeout=SECONDS,
            store=store,
            connections=Connections(Wish("auto", "signature")),
        )
        try:
            yield groups, stand
        finally:
            groups.close()


def _wrapped(module: object, names: tuple[str, ...], flavour: Flavour) -> SimpleNamespace:
    """A module whose functions are called with tensors of the device."""
    changed = {name: on_device(getattr(module, name), flavour.tensors) for name in names}
    return SimpleNamespace(**{**vars(module), **changed})


@contextmanager
def exchanges_on_device(flavour: Flavour) -> Iterator[None]:
    """The tests of the exchanges, as they are, with every tensor that they exchange on the device."""

    def dispatch(*args, **kwargs):
        sent = on_device(experts.dispatch, flavour.tensors)(*args, **kwargs)
        tensors = {name: value for name, value in vars(sent).items() if isinstance(value, torch.Tensor)}
        return replace(sent, **{name: value.cpu() for name, value in tensors.items()})

    names = ("all_gather_rows", "exchange_rows", "exchange_counts")
    heads = ("publish_heads", "reduce_partials", "gather_weight_shards", "gather_projected")
    routed = SimpleNamespace(
        **{**vars(experts), "dispatch": dispatch, "combine": on_device(experts.combine, flavour.tensors)}
    )
    with ExitStack() as stack:
        for module, name, changed in (
            (test_collectives, "collectives", _wrapped(collectives, names, flavour)),
            (test_projection, "projection", _wrapped(projection, heads, flavour)),
            (test_logits, "lg", _wrapped(logits, ("gather_asked", "return_logits", "return_best"), flavour)),
            (test_context_gather, "gather_context", on_device(context_gather.gather_context, flavour.tensors)),
            (test_experts, "experts", routed),
        ):
            stack.enter_context(patch.object(module, name, changed))
        yield


def every_exchange(base: Groups, flavour: str, folder: str) -> dict:
    """All exchanges of the library on a device, each against its oracle; the calls that reached the backend."""
    world = base.topology.world
    played = FLAVOURS[flavour]
    with device_groups(base, played, Topology(world, world, world), folder) as (groups, stand):
        try_exchanges(groups)
        with exchanges_on_device(played):
            test_collectives.gather_everything(groups)
            test_collectives.exchange_everything(groups)
            test_collectives.all_bits(groups)
            # Bytes and the agreement go by the control group, which stays on the CPU.
            test_collectives.control(groups)
            for kind in test_context_gather.KINDS:
                test_context_gather.sweep(groups, kind, "bfloat16")
            for how in ("random", "holes", "nowhere"):
                test_experts.check(groups, [5, 0, 8, 1][:world], 3, how, "int8")
            # Rows that are too many to ride packed.
            test_experts.check(groups, [512] * world, 2, "random", "bfloat16", 500)
            test_logits.gather(groups)
            test_logits.give_back(groups, "float32")
            for body in (test_projection.publish, test_projection.reduce, test_projection.weights):
                body(groups, 8)
        return stand.calls


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_exchange_keeps_the_rules(own_ranks: RankPools, flavour: str, world: int, tmp_path: Path) -> None:
    target = "test_strict_backend:every_exchange"
    answers = own_ranks.run(Topology(world, 1, world), target, timeout=120, flavour=flavour, folder=str(tmp_path))
    for calls in answers:
        assert set(calls) == {FLAVOURS[flavour].gather, "all_to_all_single"}, calls
        assert min(calls.values()) > 50, calls


def fixtures(base: Groups, flavour: str, folder: str, names: list[str]) -> dict:
    """What each fixture says on a device."""
    played, found = FLAVOURS[flavour], {}
    with device_groups(base, played, Topology(2, 2, 2), folder) as (groups, stand):
        for name in names:
            fixture = registry()[name]
            options = Options(local_t=17, case="subcapacity" if "case" in fixture.flags else None)
            rows = run_fixture(fixture, Run(groups, options))
            found[name] = sorted({f"{row.output}: {row.verdict}" for row in rows if row.verdict != PASSED})
        assert set(stand.calls) == {played.gather, "all_to_all_single"}
    return found


QUICK = ("cp-allgather", "publish", "experts", "logits", "agreement")


@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(registry()), marks=pytest.mark.slow)])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_fixtures_pass_on_the_stand_in(
    own_ranks: RankPools, flavour: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    """The commands that docs/backends.md asks people to run first on a device."""
    target = "test_strict_backend:fixtures"
    more = {"flavour": flavour, "folder": str(tmp_path), "names": list(names)}
    answers = own_ranks.run(Topology(2, 1, 2), target, timeout=150, **more)
    assert answers == [{name: [] for name in names}] * 2


def device_model(groups: Groups, mode: str) -> Model:
    """The rank's share of the tiny model on its device."""
    config = PRESETS["tiny"]()
    weights = shard_weights(full_weights("tiny", mode), groups.topology, groups.rank, config)
    on = torch.device(groups.device)
    return Model(config, {name: weight.to(on) for name, weight in weights.items()}, groups, numerics(mode))


def forward(base: Groups, flavour: str, sizes: list[int], folder: str) -> dict:
    """Ragged traffic through the whole network on a device, and the engine with its sampling."""
    topology = Topology(*sizes)
    with device_groups(base, FLAVOURS[flavour], topology, folder) as (groups, stand):
        model = device_model(groups, "float64")
        dp_rank = topology.coordinates(groups.rank).dp_rank
        rows = ragged_traffic(1, dp_rank, topology.tp, model.config.vocab_size, STEPS, False)
        found = run_traffic(model, rows, topology.tp, groups.rank)["logits"]
        ahead = run_traffic(model, rows, topology.tp, groups.rank, gather_weights=True)["logits"]
        assert all(bool((ahead[place] - row).abs().max() <= 1e-10) for place, row in found.items())
        engine = Engine(model, requests=2 * groups.topology.tp, max_context=128, prefill_rows=24)
        results = []
        if engine.is_front:
            results = run(engine, traffic(3))
            engine.close()
        else:
            engine.serve()
        told = [[request, position, to_bytes(row)] for (request, position), row in found.items()]
        return {"logits": told, "dp_rank": dp_rank, "results": results, "calls": stand.calls}


@pytest.mark.parametrize(
    ("flavour", "sizes"),
    [
        ("nccl", (2, 2, 2)),
        ("hccl", (2, 2, 2)),
        pytest.param("nccl", (4, 2, 4), marks=pytest.mark.slow),
        pytest.param("hccl", (4, 2, 4), marks=pytest.mark.slow),
    ],
)
def test_the_whole_network_keeps_the_rules(
    own_ranks: RankPools, flavour: str, sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    topology = Topology(*sizes)
    base = Topology(topology.world, 1, topology.world)
    target = "test_strict_backend:forward"
    answers = own_ranks.run(base, target, timeout=120, flavour=flavour, sizes=list(sizes), folder=str(tmp_path))
    vocab = single_model("tiny", "float64").config.vocab_size
    rows = [ragged_traffic(1, dp_rank, topology.tp, vocab, STEPS, False) for dp_rank in range(topology.dp)]
    wanted = [[twin_logits("tiny", "float64", tokens) for tokens in group.tokens] for group in rows]
    seen = 0
    for answer in answers:
        for request, position, row in answer["logits"]:
            assert (from_bytes(row) - wanted[answer["dp_rank"]][request][position]).abs().max() <= 1e-10
            seen += 1
        assert answer["calls"][FLAVOURS[flavour].gather] and answer["calls"]["all_to_all_single"]
    assert seen > 50
    alone = Engine(single_model("tiny", "float64"), requests=1, max_context=128)
    greedy = [index for index, (_, params) in enumerate(traffic(3)) if params.temperature == 0]
    assert greedy
    for index in greedy:
        assert answers[0]["results"][index] == run(alone, [traffic(3)[index]])[0]


def _even(rows: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None = None) -> None:
    dist.all_to_all_single(torch.empty_like(rows) if out is None else out, rows, group=group)


def _gather(rows: torch.Tensor, group: dist.ProcessGroup, ranks: int = 2) -> None:
    name = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    name(torch.empty((ranks * rows.shape[0], *rows.shape[1:]), dtype=rows.dtype, device=rows.device), rows, group=group)


def forbidden(groups: Groups) -> dict:
    """What a device would refuse -> (the call, words of the refusal)."""
    pg, cpu, rank, on = groups.tp.process_group, groups.control.process_group, groups.rank, groups.device
    x = torch.zeros(4, 6, device=on)
    whole = torch.zeros(10, 6, device=on)
    uneven, other = torch.zeros(2 + rank, 6, device=on), 1 - rank
    dtypes = (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64)
    small = {f"all-gather of {dtype}": (lambda d=dtype: _gather(x.to(d), pg), "does not travel") for dtype in dtypes}
    small |= {f"all-to-all of {dtype}": (lambda d=dtype: _even(x.to(d), pg), "does not travel") for dtype in dtypes}
    never = "where it was never looked at"
    return small | {
        "input on the CPU": (lambda: _even(torch.zeros(4, 6), pg), "is on cpu"),
        "output on the CPU": (lambda: _even(x, pg, torch.zeros(4, 6)), "is on cpu"),
        "input with strides": (lambda: _even(torch.zeros(6, 4, device=on).t(), pg, x), "not contiguous"),
        "output with strides": (lambda: _even(x, pg, torch.zeros(6, 4, device=on).t()), "not contiguous"),
        "gather with strides": (lambda: _gather(whole[:, :3], pg), "not contiguous"),
        "in place": (lambda: _even(x, pg, x), "share memory"),
        "half in place": (lambda: _even(whole[:4], pg, whole[2:6]), "share memory"),
        "another dtype": (lambda: _even(x, pg, x.double()), "float32 into torch.float64"),
        "a short output": (lambda: _gather(x, pg, 1), "into 24 over 2 ranks"),
        "splits of another sum": (lambda: dist.all_to_all_single(whole, x, [5, 5], [2, 1], group=pg), "of 4 rows"),
        "more splits than ranks": (lambda: dist.all_to_all_single(whole, x, [5, 5], [2, 1, 1], group=pg), "of 4 rows"),
        "unequal gather": (lambda: _gather(uneven, pg), "ranks differ"),
        "counts that do not fit": (
            lambda: dist.all_to_all_single(x[: 3 + rank].clone(), x, [1, 2 + rank], [2, 2], group=pg),
            "ranks differ",
        ),
        "two operations": (lambda: (_gather if rank else _even)(x, pg), "ranks differ"),
        "two dtypes": (lambda: _even(x.to((torch.float32, torch.int32)[rank]), pg), "ranks differ"),
        "two widths": (lambda: _even(whole.view(-1)[: 24 * (1 + rank)].view(4, -1).clone(), pg), "ranks differ"),
        "a list of outputs": (lambda: dist.all_gather([x.clone(), x.clone()], x, group=pg), never),
        "lists": (lambda: dist.all_to_all([x[:2].clone(), x[:2].clone()], list(x.split(2)), group=pg), never),
        "send": (lambda: dist.isend(x, group=pg, group_dst=other, tag=1), never),
        "receive": (lambda: dist.irecv(x, group=pg, group_src=other), never),
        "gather": (lambda: dist.gather(x, [x, x] if rank == 0 else None, group=pg, group_dst=0), never),
        "sum": (lambda: dist.all_reduce(x, group=pg), never),
        "barrier": (lambda: dist.barrier(pg), never),
        "monitored barrier": (lambda: dist.monitored_barrier(pg), never),
        "objects": (lambda: dist.all_gather_object([None, None], 1, group=pg), never),
        "the world": (lambda: dist.all_reduce(x), never),
        "a device's tensor on a group of the CPU": (lambda: dist.all_reduce(x, group=cpu), "is given a tensor"),
        "a mixed sum": (lambda: x + torch.zeros(4, 6), "mixes tensors"),
        "a mixed index": (lambda: x.index_select(0, torch.tensor([1])), "mixes tensors"),
        "numpy": (lambda: x.numpy(), "has no numpy array"),
        "another device": (lambda: x.to(f"{x.device.type}:1"), "this rank's device"),
    }


def refusals(base: Groups, flavour: str, folder: str) -> list[str]:
    """What was not refused, or for another reason; legal calls in between must pass."""
    played, wrong = FLAVOURS[flavour], []
    with device_groups(base, played, Topology(2, 2, 2), folder) as (groups, _):
        pg = groups.tp.process_group
        for name, (call, words) in forbidden(groups).items():
            try:
                call()
            except (Refused, TypeError) as problem:
                if words not in str(problem):
                    wrong.append(f"{name}: {problem}")
            else:
                wrong.append(f"{name} was let through")
            _even(torch.zeros(4, 6, dtype=torch.bfloat16, device=groups.device), pg)
            _gather(torch.zeros(0, 6, device=groups.device), pg)
        assert (torch.zeros(3, device=groups.device) + torch.tensor(1.0)).cpu().device == CPU
        wrong += planted(groups)
    return wrong


def planted(groups: Groups) -> list[str]:
    """Faults of the library itself that gloo would carry: each must come back as an error of the call."""
    rows = torch.zeros(4, 6, device=groups.device)
    plants = {
        "int16 on the wire": (backend, "WIRE_DTYPES", (torch.int16,), rows.to(torch.int16), "does not travel"),
        "rows left in their layout": (torch.Tensor, "contiguous", lambda x: x, rows.t(), "not contiguous"),
    }
    wrong = []
    for name, (owner, attribute, changed, x, words) in plants.items():
        # A group of its own, for an error ends the use of those that share its health.
        group = replace(groups.tp, health=type(groups.tp.health)(), control=None, check="off")
        with patch.object(owner, attribute, changed):
            try:
                collectives.all_gather_rows(x, group, stage="plant")
            except CommError as problem:
                if words not in str(problem):
                    wrong.append(f"{name}: {problem}")
            else:
                wrong.append(f"{name} was not seen")
    return wrong


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_stand_in_refuses_what_a_device_refuses(own_ranks: RankPools, flavour: str, tmp_path: Path) -> None:
    target = "test_strict_backend:refusals"
    answers = own_ranks.run(Topology(2, 1, 2), target, timeout=60, flavour=flavour, folder=str(tmp_path))
    assert answers == [[], []]


def test_nothing_is_played_outside() -> None:
    before = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather_single", "new_group")}
    with stand_in(FLAVOURS["hccl"]):
        assert dist.all_gather_single is None
        assert torch.zeros(2, device=FLAVOURS["hccl"].device).sum().device.type == "privateuseone"
    assert {name: getattr(dist, name) for name in before} == before
    assert torch.zeros(2).device == CPU
