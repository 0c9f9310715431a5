"""What a checkpoint holds, or what the name table says that it would."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ..v4.config import V4Config
from .forms import OFFICIAL, stored_table
from .names import TensorSpec, tensor_table
from .reader import ITEM_BYTES
from .verify import open_checkpoint


@dataclass(frozen=True)
class Part:
    """Totals of one part of the model; parameters count logical elements, scales not among them."""

    tensors: int
    num_bytes: int
    parameters: int


@dataclass(frozen=True)
class Inventory:
    """Tensors (scales included), bytes and dtype histogram of a checkpoint, and totals by part. form: official or
    w8a8."""

    tensors: int
    num_bytes: int
    parameters: int
    dtypes: dict[str, int]
    parts: dict[str, Part]
    shards: int | None = None
    notes: tuple[str, ...] = ()
    form: str = OFFICIAL


def inventory(directory: Path | str) -> Inventory:
    """Inventory of a folder, verified first (CheckpointError)."""
    checkpoint = open_checkpoint(directory)
    items = []
    for spec in stored_table(checkpoint.config, checkpoint.form):
        names = [spec.name] + ([spec.scale_name] if spec.scale_name else [])
        items.append((spec, [(checkpoint.stored[n].dtype, checkpoint.stored[n].shape) for n in names]))
    shards = len({stored.shard for stored in checkpoint.stored.values()})
    return replace(_total(iter(items), shards, checkpoint.notes), form=checkpoint.form)


def preset_inventory(config: V4Config) -> Inventory:
    """Inventory that the name table implies for a config."""
    items = ((spec, list(_official(spec))) for spec in tensor_table(config))
    return _total(items, None, ())


def format_inventory(found: Inventory) -> dict[str, Any]:
    """The inventory as plain data for JSON."""
    parts = {
        name: {"tensors": part.tensors, "bytes": part.num_bytes, "parameters": part.parameters}
        for name, part in found.parts.items()
    }
    return {
        "tensors": found.tensors,
        "bytes": found.num_bytes,
        "parameters": found.parameters,
        "dtypes": dict(sorted(found.dtypes.items())),
        "parts": parts,
        "form": found.form,
        "shards": found.shards,
        "notes": list(found.notes),
    }


def part_of(spec: TensorSpec) -> str:
    """The part of the model that a tensor is counted under."""
    if spec.is_draft:
        return "draft"
    for mark, part in _PARTS:
        if mark in spec.name:
            return part
    return "norms"


_PARTS = (
    ("embed.", "embedding"),
    ("head.weight", "head"),
    ("hc_", "hyper-connections"),
    (".ffn.experts.", "routed experts"),
    (".shared_experts.", "shared experts"),
    (".gate.", "gates"),
    (".indexer.", "indexers"),
    (".compressor.", "compressors"),
    (".attn.", "attention"),
)


def _official(spec: TensorSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield spec.dtype, spec.stored_shape
    if spec.scale_shape is not None:
        yield "F8_E8M0", spec.scale_shape


def _total(
    items: Iterator[tuple[TensorSpec, list[tuple[str, tuple[int, ...]]]]], shards: int | None, notes: tuple[str, ...]
) -> Inventory:
    dtypes: Counter[str] = Counter()
    tensors: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    for spec, files in items:
        part = part_of(spec)
        parameters[part] += prod(spec.shape)
        for dtype, shape in files:
            dtypes[dtype] += 1
            tensors[part] += 1
            num_bytes[part] += prod(shape) * ITEM_BYTES[dtype]
    parts = {name: Part(tensors[name], num_bytes[name], parameters[name]) for name in tensors}
    return Inventory(tensors.total(), num_bytes.total(), parameters.total(), dict(dtypes), parts, shards, notes)
