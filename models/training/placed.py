"""place: a module under one of three placements, ready for the trainer's steps (training.md 7.6, 9.1).

ddp: whole parameters, gradients all-reduced once a step. sharded: whole parameters, gradients reduce-scattered once a
step, masters and moments divided over the ranks. fsdp: all of it sharded, reduce-scatter in every micro-step. Experts
over an expert group (`shard_experts`) are held so by the ranks that have the same ones.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...comm.collectives import all_gather_rows
from ...parallel.group import Group
from ...parallel.groups import Groups
from ..moe.expert_parallel import ParallelExperts
from .flat import FlatPart
from .full_shard import UnitPart, shard_module
from .parts import Part, Share, WholePart, master_dtype, wide_names
from .placement import AdamWSettings
from .scattered import ScatteredPart
from .stepping import MakeOptimizer, Stepped, adamw

Kind = Literal["ddp", "sharded", "fsdp"]


class Placed(Stepped):
    """The placement of a module, from which a state can be saved.

    shapes and compute dtypes by name: of every trained parameter, of experts as this rank holds them.
    """

    def __init__(
        self,
        kind: Kind,
        module: nn.Module,
        parts: Sequence[Part],
        groups: Groups,
        make_optimizer: MakeOptimizer,
        shapes: Mapping[str, tuple[int, ...]],
        compute: Mapping[str, torch.dtype],
    ) -> None:
        super().__init__(parts, groups.control, make_optimizer)
        self.kind, self.module, self.topology = kind, module, groups.topology
        self.shapes, self.compute = dict(shapes), dict(compute)

    def zero(self) -> None:
        if isinstance(self.module, FSDPModule):
            self.module.reset_iter_state()
        super().zero()

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole values of the trained parameters, in FP32 at least, on every rank. Collective."""
        for part in self.parts:
            yield from part.whole()


def place(
    module: nn.Module,
    groups: Groups,
    kind: Kind = "ddp",
    *,
    optimizer: AdamWSettings | MakeOptimizer | None = None,
    compute_dtype: torch.dtype | None = None,
    units: Sequence[nn.Module] | None = None,
    reshard_after_forward: bool = True,
) -> Placed:
    """Place a module whose values are those of the masters; changes it in place. Collective over the world.

    compute_dtype: what parameters are cast to for forward and backward (None: they stay), but for those that
    `WideParameters` keep; buffers and inputs are left alone. units: what fsdp gathers at once, the module's `layers`
    if not given; parameters outside of them stay gathered, so that heads can be used beside the module's forward.
    reshard_after_forward: whether units free their parameters between their forward and their backward; fsdp only.
    ValueError for an unknown kind, no trainable parameter, and ranks that hold other values than their replicas.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"placement is {kind!r}, allowed: {', '.join(get_args(Kind))}")
    if compute_dtype is not None and not compute_dtype.is_floating_point:
        raise ValueError(f"compute_dtype is {compute_dtype}, allowed: a floating point dtype or None")
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("no parameter needs a gradient: there is nothing to train")
    shapes = {name: tuple(p.shape) for name, p in trained.items()}
    shares = _shares(module, trained, groups)
    _check_alike(shares, groups.control)
    wide = wide_names(module)
    compute = {n: _compute_dtype(p, None if n in wide else compute_dtype) for n, p in trained.items()}
    if kind == "ddp":
        parts: list[Part] = [WholePart(share, compute) for share in shares]
    elif kind == "sharded":
        parts = [FlatPart(share, compute, "dense" if share.shards is None else "experts") for share in shares]
    else:
        parts = _shard_fully(module, shares, compute, compute_dtype, units, reshard_after_forward)
    settings = AdamWSettings() if optimizer is None else optimizer
    make = adamw(settings) if isinstance(settings, AdamWSettings) else settings
    return Placed(kind, module, parts, groups, make, shapes, compute)


def _compute_dtype(parameter: Tensor, wanted: torch.dtype | None) -> torch.dtype:
    return master_dtype(parameter) if wanted is None else wanted


def _shares(module: nn.Module, trained: Mapping[str, nn.Parameter], groups: Groups) -> list[Share]:
    """Dense parameters, then experts that are shared out over an expert group, if there are any."""
    experts = _experts(module)
    own = {id(p) for m in experts for p in m.parameters()}
    dense = Share({n: p for n, p in trained.items() if id(p) not in own}, groups.world)
    if not own:
        return [dense]
    held = {n: p for n, p in trained.items() if id(p) in own}
    return [dense, Share(held, groups.expert_replicas(), experts[0].group)]


def _experts(module: nn.Module) -> list[ParallelExperts]:
    return [m for m in module.modules() if isinstance(m, ParallelExperts) and m.group.size > 1]


def _shard_fully(
    module: nn.Module,
    shares: Sequence[Share],
    compute: Mapping[str, torch.dtype],
    compute_dtype: torch.dtype | None,
    units: Sequence[nn.Module] | None,
    reshard_after_forward: bool,
) -> list[Part]:
    """Units where there are several replicas. Outside of them stay what lies outside of layers, parameters of a dtype
    of their own, and experts that no other rank holds."""
    units = _layers(module) if units is None else units
    inside = {id(p) for unit in units for p in unit.parameters()}
    apart = []
    for share in shares:
        fits = {n for n, p in share.parameters.items() if id(p) in inside and compute[n] == (compute_dtype or p.dtype)}
        apart.append(_split(share, fits if share.replicas.size > 1 else set()))
    # From the inside out: experts, layers, and the module, which opens and ends what its units do together.
    for (sharded, _), modules in reversed(list(zip(apart, (units, _experts(module)), strict=False))):
        held = set(sharded.parameters.values())
        for unit in modules if held else ():
            shard_module(unit, sharded.replicas, held, compute_dtype, reshard_after_forward)
    if apart[0][0].parameters:
        shard_module(module, shares[0].replicas, set(), compute_dtype, False)
    parts: list[Part] = []
    now = dict(module.named_parameters())
    for sharded, rest in apart:
        if sharded.parameters:
            parts.append(UnitPart(Share({n: now[n] for n in sharded.parameters}, sharded.replicas, sharded.shards)))
        if rest.parameters:
            parts.append(ScatteredPart(rest, compute))
    return parts


def _layers(module: nn.Module) -> list[nn.Module]:
    layers = getattr(module, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"units is None, and {type(module).__name__} has no `layers`: say what is gathered at once")
    return list(layers)


def _split(share: Share, names: set[str]) -> tuple[Share, Share]:
    inside = {n: p for n, p in share.parameters.items() if n in names}
    outside = {n: p for n, p in share.parameters.items() if n not in names}
    return Share(inside, share.replicas, share.shards), Share(outside, share.replicas, share.shards)


@torch.no_grad()
def _check_alike(shares: Sequence[Share], control: Group) -> None:
    """ValueError on all ranks alike unless replicas start from the same bits: a shard would be of another value."""
    differ = [name for share in shares for name in _differing(share)]
    counts = all_gather_rows(torch.tensor([len(differ)]), control, stage="start_values").tolist()
    if any(counts):
        raise ValueError(f"ranks start from different values: {counts} parameters by rank, here {differ[:5]}")


def _differing(share: Share) -> list[str]:
    """Names of parameters that not all replicas hold alike."""
    marks = [zlib.crc32(_bytes(parameter)) for parameter in share.parameters.values()]
    mine = torch.tensor([marks], dtype=torch.int64).to(share.replicas.device)
    told = all_gather_rows(mine, share.replicas, stage="start_values").cpu()
    return [n for n, column in zip(share.parameters, told.T, strict=True) if len(set(column.tolist())) > 1]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
