"""One rank, two and four take the same steps, whichever placement holds the draft and however the batch is divided."""

from functools import cache
from typing import Any

import pytest
import torch
from placement_scene import build, config, micro_batches, sgd, values
from rank_pool import RankPools, from_bytes, to_bytes
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshspark.models.drafts.draft import DSparkDraft
from meshspark.models.training import scattered
from meshspark.models.training.parts import wide_names
from meshspark.models.training.placed import Placed, place
from meshspark.parallel.groups import Groups
from meshspark.parallel.ledger import Ledger
from meshspark.parallel.topology import Topology

STEPS = 5
EMPTY = {0: [0, 1, 2, 3, 4, 5], 1: [9, 10, 11], 2: [0, 1, 4, 8]}
"""By step, the samples that teach nothing: at step 0 all of rank 0 of 2, at step 1 all of rank 3 of 4."""


def run_case(groups: Groups, kind: str, accumulate: int, dtype: str, optimizer: str, steps: int = STEPS) -> list[Any]:
    wanted = {} if optimizer == "adamw" else {"optimizer": sgd}
    placed, core = build(groups, kind, groups.topology.ep > 1, getattr(torch, dtype), **wanted)
    reports = []
    for step in range(steps):
        options = {"dtype": getattr(torch, dtype), "empty": EMPTY.get(step, ())}
        world, rank = groups.world.size, groups.world.rank
        report = core.step(micro_batches(step, config(), world, rank, accumulate, options))
        reports.append([report.loss, report.gradient_norm, report.metrics["moe/step_balance"]])
    return [reports, {name: to_bytes(value) for name, value in values(placed).items()}]


def run_cases(groups: Groups, cases: list[list[Any]]) -> list[Any]:
    return [run_case(groups, *case) for case in cases]


@pytest.fixture(scope="module")
def alone() -> Any:
    """What one rank comes to with one micro-batch a step, by dtype and optimiser."""
    return cache(lambda dtype, optimizer: unpacked(run_case(Groups.single(), "ddp", 1, dtype, optimizer)))


def unpacked(result: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    return torch.tensor(result[0], dtype=torch.float64), {name: from_bytes(v) for name, v in result[1].items()}


def check(result: list[Any], wanted: tuple[Tensor, dict[str, Tensor]], run: tuple[str, str], told: str) -> None:
    reports, weights = unpacked(result)
    exact = run[0] == "float64"
    torch.testing.assert_close(reports, wanted[0], rtol=0, atol=1e-9 if exact else 1e-5, msg=lambda m: f"{told}: {m}")
    assert weights.keys() == wanted[1].keys()
    if exact or run[1] == "sgd":
        for name, value in weights.items():
            error = (value.double() - wanted[1][name].double()).abs().max().item()
            assert error <= (1e-9 if exact else 1e-6), f"{told}: {name} is {error} apart"


def compare(ranks: RankPools, topology: Topology, cases: list[tuple[Any, ...]], alone: Any) -> None:
    results = ranks.run(topology, "test_placements:run_cases", 240, cases=[list(case) for case in cases])
    for rank, of_rank in enumerate(results):
        for case, result in zip(cases, of_rank, strict=True):
            check(result, alone(*case[2:4]), case[2:4], f"{topology} rank {rank} {case}")


def test_one_rank_is_one_rank_under_full_shard(alone: Any) -> None:
    run = ("float64", "adamw")
    check(run_case(Groups.single(), "fsdp", 3, *run), alone(*run), run, "fsdp")


def test_two_ranks_are_one(ranks: RankPools, alone: Any) -> None:
    cases = [(kind, 3, "float64", "adamw") for kind in ("ddp", "sharded", "fsdp")]
    compare(ranks, Topology(2), [*cases, ("fsdp", 1, "float32", "sgd")], alone)


def test_experts_of_two_ranks_are_those_of_one(ranks: RankPools, alone: Any) -> None:
    compare(ranks, Topology(2, 1, 2), [(kind, 1, "float64", "adamw") for kind in ("ddp", "sharded", "fsdp")], alone)


def test_four_ranks_with_two_replicas_of_experts_are_one(ranks: RankPools, alone: Any) -> None:
    compare(ranks, Topology(4, 1, 2), [("fsdp", 3, "float64", "adamw")], alone)


@pytest.mark.slow
@pytest.mark.parametrize("run", [("float64", "adamw"), ("float32", "sgd"), ("float32", "adamw")], ids="-".join)
@pytest.mark.parametrize("topology", [(2, 1, 1), (2, 1, 2), (4, 1, 1), (4, 1, 2), (4, 1, 4)], ids=str)
def test_every_placement_is_one_rank(ranks: RankPools, alone: Any, topology: Any, run: tuple[str, str]) -> None:
    cases = [(kind, accumulate, *run) for kind in ("ddp", "sharded", "fsdp") for accumulate in (1, 3)]
    compare(ranks, Topology(*topology), cases, alone)


def count_reductions(groups: Groups, kind: str, accumulate: int) -> dict[str, int]:
    core = build(groups, kind, False, torch.float64)[1]
    options = {"dtype": torch.float64, "empty": ()}
    kept, groups.world.ledger = groups.world.ledger, Ledger(4096)
    core.step(micro_batches(0, config(), groups.world.size, groups.world.rank, accumulate, options))
    # A sum of gradients is one exchange, and where every rank wants it whole a gather behind it.
    sums = [r.stage for r in groups.world.ledger if "gradients" in r.stage and r.op != "all_gather_rows"]
    stages = sums + [r.stage for r in groups.world.ledger if "parameters" in r.stage]
    groups.world.ledger = kept
    return {stage: stages.count(stage) for stage in ("gradients", "unit_gradients", "unit_parameters", "parameters")}


def reductions(groups: Groups) -> list[Any]:
    return [count_reductions(groups, kind, n) for kind in ("ddp", "sharded", "fsdp") for n in (1, 3)]


def test_gradients_travel_once_a_step_or_in_every_micro_step(ranks: RankPools) -> None:
    once_ddp, thrice_ddp, once_flat, thrice_flat, once, thrice = ranks.run(Topology(2), "test_placements:reductions")[0]
    assert once_ddp == thrice_ddp and once_ddp["gradients"] > 0 and once_ddp["unit_gradients"] == 0
    assert once_flat == thrice_flat and once_flat["gradients"] == once_flat["parameters"] == 1
    assert once["unit_gradients"] == 2 and thrice["unit_gradients"] == 6
    assert thrice["gradients"] == 3 * once["gradients"] and thrice["parameters"] == once["parameters"]
    # A unit is gathered before its forward, freed, and gathered again before its backward.
    assert once["unit_parameters"] == 4


class Meter:
    """Bytes of gradients that are alive, looked at whenever backward has made one and before each reduction."""

    def __init__(self, placed: Placed, draft: DSparkDraft) -> None:
        self.placed, self.peak = placed, 0
        groups = [g for m in draft.layers for g in m._get_fsdp_state()._fsdp_param_groups]
        self.unit_parameters = [p for group in groups for p in group.fsdp_params]
        for parameter in self.unit_parameters:
            parameter._unsharded_param.register_post_accumulate_grad_hook(lambda _: self.look())

    def look(self, more: int = 0) -> None:
        # While a unit is gathered its shards are not among the module's parameters.
        kept = [master.grad for master in self.placed.masters.values()]
        held = [p for part in self.placed.parts for p in part.share.parameters.values()]  # type: ignore[attr-defined]
        for parameter in held:
            grad = parameter.grad
            kept.append(grad.to_local() if isinstance(grad, DTensor) else grad)
        for parameter in self.unit_parameters:
            kept.append(parameter._unsharded_param.grad)
            kept.append(parameter.unsharded_accumulated_grad)
        storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in kept if g is not None}
        self.peak = max(self.peak, sum(storages.values()) + more)


def measure_gradients(groups: Groups, dtype: str) -> list[int]:
    compute = getattr(torch, dtype)
    wide = torch.promote_types(compute, torch.float32)
    placed, core = build(groups, "fsdp", False, wide, compute_dtype=None if compute == wide else compute)
    draft = placed.module
    assert isinstance(draft, DSparkDraft)
    whole = {name: p.numel() for name, p in draft.named_parameters()}
    compute_of = {name: placed.compute[name].itemsize for name in whole}
    units = [sum(n * compute_of[name] for name, n in whole.items() if name.startswith(f"layers.{i}.")) for i in (0, 1)]
    options = {"dtype": compute, "empty": ()}
    batches = micro_batches(0, config(), groups.world.size, groups.world.rank, 3, options)
    core.step(batches)
    meter = Meter(placed, draft)
    reduce = scattered.reduce_scatter_rows

    def measured(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        meter.look(x.numel() * x.element_size())
        return reduce(x, *args, **kwargs)

    scattered.reduce_scatter_rows = measured
    peaks = []
    try:
        for count in (1, 4):
            meter.peak = 0
            core.step((batches * 2)[:count])
            peaks.append(meter.peak)
    finally:
        scattered.reduce_scatter_rows = reduce
    sharded = sum(master.numel() * master.element_size() for master in placed.masters.values())
    return [*peaks, sharded, max(units), sum(whole.values()) * wide.itemsize]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_shard_never_keeps_whole_gradients(ranks: RankPools, dtype: str) -> None:
    for one, four, sharded, largest, whole in ranks.run(Topology(2), "test_placements:measure_gradients", dtype=dtype):
        assert one == four, "accumulation needs memory"
        assert sharded < one <= sharded + largest, (one, sharded, largest)
        assert sharded <= whole / 2 * 1.02


def narrow_run(groups: Groups, kind: str) -> list[Any]:
    """Steps in BF16: dtypes of parameters that a forward sees, and what training comes to."""
    placed, core = build(groups, kind, groups.topology.ep > 1, torch.float32, compute_dtype=torch.bfloat16)
    seen: dict[str, str] = {}

    def look(module: Any, args: Any) -> None:
        seen.update({name: str(p.dtype) for name, p in module.named_parameters()})

    draft = placed.module
    assert isinstance(draft, DSparkDraft)
    wide = wide_names(draft)
    draft.layers[0].register_forward_pre_hook(look)
    start = values(placed)
    options = {"dtype": torch.bfloat16, "empty": ()}
    losses = [
        core.step(micro_batches(step, config(), groups.world.size, groups.world.rank, 1, options)).loss
        for step in range(3)
    ]
    kept = {name.removeprefix("layers.0.") for name in wide if name.startswith("layers.0.")}
    narrow = {name for name, dtype in seen.items() if dtype == "torch.bfloat16"}
    masters = {str(master.dtype) for master in placed.masters.values()}
    end = values(placed)
    return [losses, sorted(kept), sorted(seen.keys() - narrow), sorted(masters), steps_below(start, end)]


def steps_below(start: dict[str, Tensor], end: dict[str, Tensor]) -> bool:
    """Whether masters hold what BF16 would have rounded away."""
    moved = [name for name, value in end.items() if not torch.equal(value, value.bfloat16().float())]
    return len(moved) > len(end) / 2 and any(not torch.equal(start[n], end[n]) for n in end)


def narrow_runs(groups: Groups, kinds: list[str]) -> list[Any]:
    return [narrow_run(groups, kind) for kind in kinds]


def test_masters_and_mixing_stay_wide_under_bfloat16(ranks: RankPools) -> None:
    alone = narrow_run(Groups.single(), "ddp")
    found = [alone]
    for topology, kinds in ((Topology(2), ["fsdp"]), (Topology(2, 1, 2), ["sharded", "fsdp"])):
        found += ranks.run(topology, "test_placements:narrow_runs", kinds=kinds)[0]
    for losses, kept, wide, masters, precise in found:
        assert any("sinks" in name for name in kept) and any("mix_weight" in name for name in kept)
        assert wide == kept, "what is not narrow in a layer's forward"
        assert masters == ["torch.float32"] and precise
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone[0]), rtol=0, atol=2e-2)


def start_apart(groups: Groups, kind: str) -> str:
    torch.manual_seed(7)
    draft = DSparkDraft(config())
    if groups.world.rank == 1:
        with torch.no_grad():
            draft.layers[1].input_layernorm.weight[0] += 1e-6
    try:
        place(draft, groups, kind)
    except ValueError as problem:
        return str(problem)
    return "placed"


def test_ranks_that_start_apart_are_refused(ranks: RankPools) -> None:
    for said in ranks.run(Topology(2), "test_placements:start_apart", kind="fsdp"):
        assert "different values" in said and "layers.1.input_layernorm.weight" in said


def fail_and_go_on(groups: Groups, kind: str) -> list[Any]:
    """A step with a loss that is not finite on one rank, then a good one; and the good one alone."""
    found = []
    for spoil in (True, False):
        placed, core = build(groups, kind, False, torch.float64)
        options = {"dtype": torch.float64, "empty": ()}
        batches = micro_batches(0, config(), groups.world.size, groups.world.rank, 3, options)
        if spoil:
            kept = batches[1].features_BSF.clone()
            if groups.world.rank == 1:
                batches[1].features_BSF[0, 0, 0] = torch.nan
            with pytest.raises(FloatingPointError):
                core.step(batches)
            batches[1].features_BSF.copy_(kept)
            for module in placed.module.modules():
                if hasattr(module, "reset_counts"):
                    module.reset_counts()
        core.step(batches)
        found.append({name: to_bytes(value) for name, value in values(placed).items()})
    return [found[0] == found[1]]


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_step_that_failed_leaves_nothing(ranks: RankPools, kind: str) -> None:
    assert ranks.run(Topology(2), "test_placements:fail_and_go_on", kind=kind) == [[True], [True]]


def test_what_cannot_be_placed_is_refused() -> None:
    draft = DSparkDraft(config())
    with pytest.raises(ValueError, match="placement is 'zero3', allowed: ddp, sharded, fsdp"):
        place(draft, Groups.single(), "zero3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"compute_dtype is torch\.int64"):
        place(draft, Groups.single(), "ddp", compute_dtype=torch.int64)
    with pytest.raises(ValueError, match="no parameter needs a gradient"):
        place(draft.requires_grad_(False), Groups.single(), "ddp")
    with pytest.raises(ValueError, match="has no `layers`"):
        place(torch.nn.Linear(2, 2), Groups.single(), "fsdp")
