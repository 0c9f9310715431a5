"""From the official form to W8A8's: the target's INT8 weights as codes and channel scales, the rest as it is."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from .fill import fill_int8
from .forms import OFFICIAL, W8A8_FORM, stored_table, stores_codes
from .names import TensorSpec, tensor_table
from .reader import CheckpointError, Reader
from .verify import TOKENIZER_NAME, Checkpoint, open_checkpoint
from .writer import stored_bytes, write_rest, write_shards

SHARD_BYTES = 1 << 30
"""Less than a download's shards: one is made in memory."""


def convert_w8a8(
    source: Path | str,
    target: Path | str,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Write `source` in the w8a8 form to the new folder `target`; the source, verified.

    Loading the target in numerics w8a8 gives the bits of loading the source so. Quantised is what the target model
    multiplies in INT8; mtp.* and all else is copied as it is stored, names of scales made official. Memory: a shard
    and a copy of it, some rows decoded. progress(shard, shards) after each. CheckpointError for a faulty source;
    ValueError, before anything is written, for one that is converted already, a target that exists, or a full disk.
    config.json comes last; where it fails, what was written is removed.
    """
    source, target = Path(source), Path(target)
    made = not os.path.lexists(target)
    if not made and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} exists, allowed: a folder that does not exist yet, or an empty one")
    checkpoint = open_checkpoint(source)
    if checkpoint.form != OFFICIAL:
        raise CheckpointError(f"{source}: is stored in the form {checkpoint.form}, allowed: {OFFICIAL}")
    table = stored_table(checkpoint.config, W8A8_FORM)
    check_room(target, sum(map(stored_bytes, table)))
    try:
        target.mkdir(parents=True, exist_ok=True)
        _write(checkpoint, target, table, shard_bytes, progress)
    except BaseException:
        _remove(target, made)
        raise
    return checkpoint


def _write(
    checkpoint: Checkpoint,
    target: Path,
    table: tuple[TensorSpec, ...],
    shard_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    official = {spec.name: spec for spec in tensor_table(checkpoint.config)}
    with Reader(checkpoint.directory) as reader:

        def make(specs: list[TensorSpec]) -> dict[str, torch.Tensor]:
            return _converted(specs, official, checkpoint, reader)

        for number, shards in write_shards(target, table, shard_bytes, make):
            if progress is not None:
                progress(number, shards)
    tokenizer = checkpoint.directory / TOKENIZER_NAME
    text = tokenizer.read_text(encoding="utf-8") if tokenizer.exists() else None
    form = {
        "quant_method": W8A8_FORM,
        "fmt": "int8",
        "activation_scheme": "dynamic",
        "scale_fmt": "float32",
        # Of what is still in blocks.
        "weight_block_size": list(checkpoint.config.weight_block_size),
    }
    write_rest(target, {**checkpoint.config.to_json(), "quantization_config": form}, text)


def _converted(
    specs: list[TensorSpec], official: Mapping[str, TensorSpec], checkpoint: Checkpoint, reader: Reader
) -> dict[str, torch.Tensor]:
    """The tensors of some specs of the w8a8 form, by name."""
    tensors: dict[str, torch.Tensor] = {}
    for spec in specs:
        if stores_codes(spec):
            assert spec.scale_name is not None
            codes, scale = torch.empty(spec.shape, dtype=torch.int8), torch.empty(spec.shape[0])
            whole = tuple(slice(0, size) for size in spec.shape)
            fill_int8(codes, scale, official[spec.name], whole, checkpoint, reader)
            tensors[spec.name], tensors[spec.scale_name] = codes, scale
            continue
        for name in (spec.name, spec.scale_name):
            if name is not None:
                # A clone: safetensors refuses tensors that share memory, as the maps of one file do.
                tensors[name] = reader.read(checkpoint.stored[name]).clone()
    return tensors


def check_room(target: Path, needed: int) -> None:
    """ValueError where the disk of a folder, which need not exist yet, has less free."""
    parent = next(folder for folder in (target, *target.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ValueError(f"{target}: takes {needed:,} bytes, free on its disk are {free:,}")


def _remove(target: Path, made: bool) -> None:
    """Take back what a failed conversion has written into a folder that was empty or absent."""
    if made:
        shutil.rmtree(target, ignore_errors=True)
        return
    for path in target.iterdir():
        path.unlink(missing_ok=True)
