"""An official drafter to a draft's own folder. training.md 8.3."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ..checkpoint.reader import Reader
from ..checkpoint.stream import TORCH_DTYPES, Planned, stream_file, stream_shards
from ..checkpoint.verify import CONFIG_NAME
from ..checkpoint.writer import write_json_file
from .configs import draft_json
from .folder import DTYPES_NAME, OFFICIAL_CONFIG, SCALES_NAME, SHARD_BYTES, Converted, check_target, writing_to
from .names import DraftTensor, draft_tensors
from .official import Official, open_official, pieces
from .ours import sliced_names
from .variants import GATE_BIAS, IMAGE_BIAS, Variant

DTYPES = {"bfloat16": "BF16", "float32": "F32"}
"""Dtype of the draft's weights -> safetensors' name."""

_MARGIN = 16 << 20
"""Bytes on disk for headers, index and configs."""


def import_dspark(
    source: Path,
    target: Path,
    variant: Variant,
    *,
    dtype: str = "bfloat16",
    keep_scales: bool = False,
    ep_slices: int = 1,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    root: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Converted:
    """Write the drafter of an official checkpoint folder as a draft of ours.

    dtype: of the weights, bfloat16 or float32; sinks, routing biases and residual mixes are FP32 always. Every value is
    the official one exactly. keep_scales: keep what an export needs to give the official bytes again. ep_slices: store
    each stack of experts as so many tensors. root: a folder around the source in which its links may end.
    progress(shard, shards) after each shard. All names and shapes are checked before anything is written; memory is
    that of some matrices, whatever the sizes of the stacks. CheckpointError for a faulty source, ValueError for what
    was asked wrongly; after either nothing is left that was written.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, allowed: {', '.join(DTYPES)}")
    check_target(source, target, overwrite)
    official = open_official(source, variant, root)
    _check_asked(official, keep_scales, ep_slices)
    tensors = draft_tensors(official.table)
    with official.reader() as reader:
        planned = list(_plan(tensors, DTYPES[dtype], ep_slices, official, reader))
        kept = list(_plan_scales(official, reader)) if keep_scales else []
        num_bytes = sum(each.num_bytes for each in planned)
        with writing_to(target, num_bytes + sum(each.num_bytes for each in kept) + _MARGIN):
            shards = 0
            for number, shards in stream_shards(target, planned, shard_bytes):
                if progress is not None:
                    progress(number, shards)
            notes = _image_bias_notes(official, reader, keep_scales)
            if keep_scales:
                stream_file(target / SCALES_NAME, kept)
                write_json_file(target / DTYPES_NAME, _unusual_dtypes(official))
            (target / OFFICIAL_CONFIG).write_bytes(official.config_bytes)
            config = draft_json(variant, official.shape, official.raw, dtype)
            write_json_file(target / CONFIG_NAME, config)
    parameters = sum(tensor.numel for tensor in tensors)
    return Converted(len(planned), num_bytes, shards, parameters, notes)


def _check_asked(official: Official, keep_scales: bool, ep_slices: int) -> None:
    experts = official.shape.n_routed_experts
    if ep_slices < 1 or experts % ep_slices:
        raise ValueError(f"--ep-slices is {ep_slices}, allowed: a divisor of the drafter's {experts} experts")
    if keep_scales and not official.is_quantised:
        raise ValueError(f"--keep-scales: {official.folder} is not quantised and has no scales to keep")


def _plan(
    tensors: tuple[DraftTensor, ...], weight_dtype: str, ep_slices: int, official: Official, reader: Reader
) -> Iterator[Planned]:
    for tensor in tensors:
        dtype = "F32" if tensor.is_wide else weight_dtype
        slices = sliced_names(tensor, ep_slices) if tensor.is_stack else [(tensor.name, range(1))]
        for name, experts in slices:
            part = replace(
                tensor,
                name=name,
                shape=(len(experts), *tensor.shape[1:]) if tensor.is_stack else tensor.shape,
                experts=tensor.experts[experts.start : experts.stop],
            )
            make = partial(pieces, part, TORCH_DTYPES[dtype], official, reader)
            yield Planned(name, dtype, part.shape, make)


def _plan_scales(official: Official, reader: Reader) -> Iterator[Planned]:
    """What an import drops: scales and image biases, as they are stored."""
    for spec in official.table:
        name = spec.name if spec.name.endswith(IMAGE_BIAS) else spec.scale_name
        if name is not None:
            stored = official.stored[name]
            yield Planned(name, stored.dtype, stored.shape, partial(_whole, official, name, reader))


def _whole(official: Official, name: str, reader: Reader) -> list[torch.Tensor]:
    return [reader.read(official.stored[name])]


def _unusual_dtypes(official: Official) -> dict[str, str]:
    """Name -> dtype of weights that are stored in another one than the layout's."""
    pairs = ((spec, official.stored[spec.name].dtype) for spec in official.table)
    return {spec.name: dtype for spec, dtype in pairs if dtype != spec.dtype}


def _image_bias_notes(official: Official, reader: Reader, keep_scales: bool) -> tuple[str, ...]:
    names = [spec.name for spec in official.table if spec.name.endswith(IMAGE_BIAS)]
    differ = []
    for name in names:
        pair = (name, name.removesuffix(IMAGE_BIAS) + GATE_BIAS)
        image, bias = (reader.read(official.stored[each]) for each in pair)
        if not torch.equal(image, bias):
            differ.append(name)
    if not differ:
        return ()
    kept = "kept beside the draft" if keep_scales else "an export writes gate.bias in their place"
    return (f"dropped, other than gate.bias: {', '.join(differ)}; {kept}",)
