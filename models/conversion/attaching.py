"""A target's checkpoint with a draft of ours as its drafter: one folder that drafts."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.convert import check_room
from ..checkpoint.forms import OFFICIAL
from ..checkpoint.reader import INDEX_NAME, Reader, Stored, read_json_object, weight_map_of
from ..checkpoint.stream import Planned, stream_file
from ..checkpoint.verify import CONFIG_NAME, Checkpoint, open_checkpoint
from ..checkpoint.writer import write_json_file
from ..dspark.calibration import FILE_NAME as CALIBRATION_NAME
from ..v4.config import CONFIG_LIMIT
from .configs import own_shape
from .exporting import export_dspark
from .folder import SHARD_BYTES, Converted
from .variants import MTP, PREFIX, VARIANTS, Variant

DRAFTER_SHARD = "drafter-{}"
"""What the name of an exported shard becomes beside the target's."""


def attach_dspark(
    target: Path,
    draft: Path,
    out: Path,
    variant: Variant = VARIANTS["v4"],
    *,
    replace: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Converted:
    """Write `out`: the target's files as they are, the draft as mtp.* in the official form, and one config and index.

    target: an official V4 checkpoint, without a drafter or, with replace, with one that is left out together with its
    calibration. draft: a folder as training or an import writes it. variant: V4's DSpark drafter or MTP, which the
    draft has to be. out: a folder that does not exist; it appears when it is whole. The target's shards are linked
    where the file system can, else copied; one that holds tensors of the earlier drafter, too, is written anew without
    them. What is returned counts the drafter's tensors. ValueError for what was asked wrongly, CheckpointError for
    faulty folders; nothing is left of what failed.
    """
    if os.path.lexists(out):
        raise ValueError(f"{out} exists, allowed: a folder that does not exist yet")
    checkpoint = open_checkpoint(target)
    config = drafting_config(checkpoint, draft, variant, replace=replace)
    kept = [stored for name, stored in checkpoint.stored.items() if not name.startswith(PREFIX)]
    size = sum(stored.num_bytes for stored in kept)
    plain = _plain_files(checkpoint)
    out.parent.mkdir(parents=True, exist_ok=True)
    check_room(out, size + sum((target / name).stat().st_size for name in plain))
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
        whole, own = Path(work) / "whole", Path(work) / "drafter"
        write_json_file(official := Path(work) / CONFIG_NAME, config)
        done = export_dspark(
            draft, own, variant, form="official", official_config=official, shard_bytes=shard_bytes, progress=progress,
        )  # fmt: skip
        whole.mkdir()
        _carry_shards(checkpoint, kept, whole)
        for name in plain:
            shutil.copy2(target / name, whole / name)
        weight_map = {stored.name: stored.shard for stored in kept}
        for path in sorted(own.glob("*.safetensors")):
            path.rename(whole / DRAFTER_SHARD.format(path.name))
        drafter = weight_map_of(own / INDEX_NAME)
        weight_map |= {name: DRAFTER_SHARD.format(shard) for name, shard in drafter.items()}
        metadata = {"total_size": size + done.num_bytes}
        write_json_file(whole / INDEX_NAME, {"metadata": metadata, "weight_map": weight_map})
        write_json_file(whole / CONFIG_NAME, config)
        open_checkpoint(whole)
        whole.rename(out)
    return done


def drafting_config(checkpoint: Checkpoint, draft: Path, variant: Variant, *, replace: bool = False) -> dict[str, Any]:
    """The target's config.json with the keys of the draft, and without those of an earlier one. ValueError where they
    do not go together."""
    if variant not in (VARIANTS["v4"], MTP):
        raise ValueError(f"variant is {variant.name}, allowed: v4 or mtp, for the target is V4's")
    target, path = checkpoint.directory, draft / CONFIG_NAME
    if checkpoint.form != OFFICIAL:
        raise ValueError(f"{target} is stored as {checkpoint.form}, allowed: {OFFICIAL}; convert it afterwards")
    if checkpoint.config.drafter != "none" and not replace:
        raise ValueError(
            f"{target} has a drafter ({checkpoint.config.drafter}), allowed: a target without one, or --replace"
        )
    raw = read_json_object(target / CONFIG_NAME, CONFIG_LIMIT)
    own = read_json_object(path, CONFIG_LIMIT)
    found, shape = own_shape(own, path)
    if found != variant:
        raise ValueError(f"{path} is a draft of kind {found.name}, allowed: {variant.name}, which is to be attached")
    layers = own["num_target_layers"]
    if layers != checkpoint.config.num_hidden_layers:
        raise ValueError(
            f"{path}: num_target_layers is {layers}, allowed: {checkpoint.config.num_hidden_layers}, as {target} has"
        )
    plain = {key: value for key, value in raw.items() if not key.startswith("dspark_")}
    ratios = checkpoint.config.compress_ratios
    return {**plain, **_drafting_keys(ratios, shape.to_json())}


def _drafting_keys(ratios: Sequence[int], shape: Mapping[str, Any]) -> dict[str, Any]:
    """dspark_* of the draft, and a 0 for each of its stages behind the target's compress_ratios."""
    stages = len(shape["compress_ratios"]) - shape["num_hidden_layers"]
    keys = {key: value for key, value in shape.items() if key.startswith("dspark_")}
    named = {"num_nextn_predict_layers": shape["num_nextn_predict_layers"], **keys}
    return {"compress_ratios": [*ratios, *[0] * stages], **named}


def _plain_files(checkpoint: Checkpoint) -> list[str]:
    """The target's files beside config, index and weights, such as the tokenizer; no calibration of a drafter."""
    files = [path for path in checkpoint.directory.iterdir() if path.is_file() and path.suffix != ".safetensors"]
    return sorted(path.name for path in files if path.name not in (CONFIG_NAME, INDEX_NAME, CALIBRATION_NAME))


def _carry_shards(checkpoint: Checkpoint, kept: Sequence[Stored], out: Path) -> None:
    """Link or copy the shards of which every tensor is kept; write those anew of which some are."""
    shards: dict[str, list[Stored]] = {}
    for stored in kept:
        shards.setdefault(stored.shard, []).append(stored)
    mixed = {stored.shard for name, stored in checkpoint.stored.items() if name.startswith(PREFIX)}
    for name, tensors in shards.items():
        if name not in mixed:
            _link(checkpoint.directory / name, out / name)
            continue
        with Reader(checkpoint.directory) as reader:
            stream_file(out / name, (Planned(s.name, s.dtype, s.shape, partial(_whole, s, reader)) for s in tensors))


def _whole(stored: Stored, reader: Reader) -> Iterator[torch.Tensor]:
    yield reader.read(stored)


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)
