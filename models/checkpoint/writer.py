"""Writing a checkpoint in the official layout."""

import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..v4.config import V4Config
from ..v4.quant import encode
from .forms import SCALE_BYTES, stores_codes
from .names import TensorSpec, tensor_table
from .reader import INDEX_NAME, ITEM_BYTES
from .verify import CONFIG_NAME, TOKENIZER_NAME

SHARD_BYTES = 4 << 30
STORED_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}


def write_checkpoint(
    directory: Path | str,
    config: V4Config,
    weights: Mapping[str, torch.Tensor],
    *,
    tokenizer_json: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Store full weights (world 1, experts stacked, any floating dtypes) as sharded safetensors with an index.

    FP8 and FP4 weights are encoded with e8m0 scales, the others cast to their stored dtype. Covers every tensor
    of the config's name table, mtp.* included; ValueError names what is missing, superfluous or misshaped before
    anything is written. Files appear under their names only when whole, config.json last; safetensors files of an
    earlier checkpoint that the new index does not name are removed.
    """
    _check_weights(config, weights)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).unlink(missing_ok=True)
    for _ in write_shards(folder, tensor_table(config), shard_bytes, lambda specs: _encoded(specs, weights)):
        pass
    write_rest(folder, config.to_json(), tokenizer_json)


def write_shards(
    folder: Path,
    table: tuple[TensorSpec, ...],
    shard_bytes: int,
    make: Callable[[list[TensorSpec]], dict[str, torch.Tensor]],
) -> Iterator[tuple[int, int]]:
    """Write the tensors that `make` gives for each shard's specs, then the index; after each shard (its number from 1,
    how many there are)."""
    shards = list(_shards(table, shard_bytes))
    weight_map: dict[str, str] = {}
    total = 0
    for number, specs in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = make(specs)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
        weight_map |= dict.fromkeys(tensors, file_name)
        partial = folder / f"{file_name}.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.rename(folder / file_name)
        del tensors
        yield number, len(shards)
    remove_stale(folder, set(weight_map.values()))
    write_json_file(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_rest(folder: Path, config_json: Mapping[str, Any], tokenizer_json: str | None) -> None:
    """Write tokenizer.json (None: there is none), and config.json last: it makes the folder a checkpoint."""
    if tokenizer_json is None:
        (folder / TOKENIZER_NAME).unlink(missing_ok=True)
    else:
        write_text_file(folder / TOKENIZER_NAME, tokenizer_json)
    write_json_file(folder / CONFIG_NAME, config_json)


def stored_bytes(spec: TensorSpec) -> int:
    """Bytes of the tensor as stored, and of its scale: FP32 of INT8 codes, one byte each of blocks."""
    scale = prod(spec.scale_shape or (0,)) * (SCALE_BYTES if stores_codes(spec) else 1)
    return prod(spec.stored_shape) * ITEM_BYTES[spec.dtype] + scale


def _check_weights(config: V4Config, weights: Mapping[str, torch.Tensor]) -> None:
    wanted: dict[str, tuple[int, ...]] = {}
    for spec in tensor_table(config):
        stacked = (config.n_routed_experts,) if spec.shard == "experts" else ()
        wanted[spec.held_name] = (*stacked, *spec.shape)
    missing = sorted(wanted.keys() - weights.keys())
    extra = sorted(weights.keys() - wanted.keys())
    wrong = [
        f"{name} {tuple(weights[name].shape)}, allowed {shape}"
        for name, shape in wanted.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if missing or extra or wrong:
        raise ValueError(f"weights: missing {missing[:5]}, not in the layout {extra[:5]}, of wrong shape {wrong[:5]}")


def _shards(table: tuple[TensorSpec, ...], shard_bytes: int) -> Iterator[list[TensorSpec]]:
    """Runs of the table of at most shard_bytes each (one tensor may exceed it); mtp.* starts a shard of its own."""
    shard: list[TensorSpec] = []
    used = 0
    for spec in table:
        starts_draft = spec.is_draft and shard and not shard[-1].is_draft
        if shard and (starts_draft or used + stored_bytes(spec) > shard_bytes):
            yield shard
            shard, used = [], 0
        shard.append(spec)
        used += stored_bytes(spec)
    yield shard


def _encoded(specs: list[TensorSpec], weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for spec in specs:
        held = weights[spec.held_name].detach().cpu()
        weight = held if spec.expert is None else held[spec.expert]
        if spec.quant is None:
            # A clone: safetensors refuses tensors that share memory, as tied or sliced weights would.
            tensors[spec.name] = weight.to(STORED_DTYPES[spec.dtype], copy=True).contiguous()
            continue
        codes, scale = encode(weight, spec.quant)
        assert spec.scale_name is not None
        tensors[spec.name], tensors[spec.scale_name] = codes, scale
    return tensors


def remove_stale(folder: Path, current: set[str]) -> None:
    """Remove shards of an earlier checkpoint."""
    for path in folder.glob("model-*-of-*.safetensors"):
        if path.name not in current:
            path.unlink()


def write_json_file(path: Path, value: object) -> None:
    """Write JSON that appears under its name only when whole."""
    write_text_file(path, json.dumps(value, indent=2, sort_keys=False) + "\n")


def write_text_file(path: Path, text: str) -> None:
    """Write text that appears under its name only when whole."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
