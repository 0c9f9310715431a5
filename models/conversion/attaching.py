"""A target's checkpoint with a draft of ours as its drafter: one folder that drafts."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.convert import check_room
from ..checkpoint.forms import OFFICIAL
from ..checkpoint.reader import INDEX_NAME, read_json_object, weight_map_of
from ..checkpoint.verify import CONFIG_NAME, Checkpoint, open_checkpoint
from ..checkpoint.writer import write_json_file
from ..v4.config import CONFIG_LIMIT
from .configs import own_shape
from .exporting import export_dspark
from .folder import SHARD_BYTES, Converted
from .variants import MTP, VARIANTS, Variant

DRAFTER_SHARD = "drafter-{}"
"""What the name of an exported shard becomes beside the target's."""


def attach_dspark(
    target: Path,
    draft: Path,
    out: Path,
    variant: Variant = VARIANTS["v4"],
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Converted:
    """Write `out`: the target's files as they are, the draft as mtp.* in the official form, and one config and index.

    target: an official V4 checkpoint without a drafter. draft: a folder as training or an import writes it. variant:
    V4's DSpark drafter or MTP, which the draft has to be. out: a folder that does not exist; it appears when it is
    whole. The target's shards are linked where the file system can, else copied. What is returned counts the drafter's
    tensors. ValueError for what was asked wrongly, CheckpointError for faulty folders; nothing is left of what failed.
    """
    if os.path.lexists(out):
        raise ValueError(f"{out} exists, allowed: a folder that does not exist yet")
    checkpoint = open_checkpoint(target)
    config = drafting_config(checkpoint, draft, variant)
    shards = {stored.shard for stored in checkpoint.stored.values()}
    plain = _plain_files(target)
    out.parent.mkdir(parents=True, exist_ok=True)
    check_room(out, sum((target / name).stat().st_size for name in (*shards, *plain)))
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
        whole, own = Path(work) / "whole", Path(work) / "drafter"
        write_json_file(official := Path(work) / CONFIG_NAME, config)
        done = export_dspark(
            draft, own, variant, form="official", official_config=official, shard_bytes=shard_bytes, progress=progress,
        )  # fmt: skip
        whole.mkdir()
        for name in shards:
            _link(target / name, whole / name)
        for name in plain:
            shutil.copy2(target / name, whole / name)
        weight_map = {stored.name: stored.shard for stored in checkpoint.stored.values()}
        for path in sorted(own.glob("*.safetensors")):
            path.rename(whole / DRAFTER_SHARD.format(path.name))
        drafter = weight_map_of(own / INDEX_NAME)
        weight_map |= {name: DRAFTER_SHARD.format(shard) for name, shard in drafter.items()}
        size = done.num_bytes + sum(stored.num_bytes for stored in checkpoint.stored.values())
        write_json_file(whole / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": weight_map})
        write_json_file(whole / CONFIG_NAME, config)
        open_checkpoint(whole)
        whole.rename(out)
    return done


def drafting_config(checkpoint: Checkpoint, draft: Path, variant: Variant) -> dict[str, Any]:
    """The target's config.json with the keys of the draft. ValueError where they do not go together."""
    if variant not in (VARIANTS["v4"], MTP):
        raise ValueError(f"variant is {variant.name}, allowed: v4 or mtp, for the target is V4's")
    target, path = checkpoint.directory, draft / CONFIG_NAME
    if checkpoint.form != OFFICIAL:
        raise ValueError(f"{target} is stored as {checkpoint.form}, allowed: {OFFICIAL}; convert it afterwards")
    if checkpoint.config.drafter != "none":
        raise ValueError(f"{target} has a drafter ({checkpoint.config.drafter}), allowed: a target without one")
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
    return {**raw, **_drafting_keys(raw, shape.to_json())}


def _drafting_keys(raw: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """dspark_* of the draft, and a 0 for each of its stages behind the target's compress_ratios."""
    stages = len(shape["compress_ratios"]) - shape["num_hidden_layers"]
    keys = {key: value for key, value in shape.items() if key.startswith("dspark_")}
    named = {"num_nextn_predict_layers": shape["num_nextn_predict_layers"], **keys}
    return {"compress_ratios": [*raw["compress_ratios"], *[0] * stages], **named}


def _plain_files(target: Path) -> list[str]:
    """The target's files beside config, index and weights, such as the tokenizer."""
    files = [path for path in target.iterdir() if path.is_file() and path.suffix != ".safetensors"]
    return sorted(path.name for path in files if path.name not in (CONFIG_NAME, INDEX_NAME))


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)
