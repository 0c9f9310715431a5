"""The folder that a conversion writes: new or empty, or one of its own that may be overwritten."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.convert import check_room
from ..checkpoint.reader import INDEX_NAME, CheckpointError, few, weight_map_of
from ..checkpoint.verify import CONFIG_NAME

OFFICIAL_CONFIG = "official_config.json"
SCALES_NAME = "official_scales.safetensors"
DTYPES_NAME = "official_dtypes.json"
"""What an import leaves beside the draft: the official config as it was; with --keep-scales the official scales and
image biases as they were stored, and what was stored in another dtype than usual."""

SHARD_BYTES = 5 * 10**9

_OWN = ("model-*-of-*.safetensors", INDEX_NAME, CONFIG_NAME, OFFICIAL_CONFIG, SCALES_NAME, DTYPES_NAME, "*.partial")
_DRAFT_NAME = re.compile(
    r"mtp\.|(fc|hidden_norm|e_proj|enorm|h_proj|hnorm|norm|residual_readout|markov_head|confidence_head)\.|"
    r"layers\.\d+\.(self_attn|mlp|input_layernorm|post_attention_layernorm|attn_residual|ffn_residual)\."
)


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote: stored tensors, their bytes, shards, logical elements, and what a reader should know."""

    tensors: int
    num_bytes: int
    shards: int
    parameters: int
    notes: tuple[str, ...]


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """ValueError unless the target is absent or empty, or may be overwritten: then it holds an earlier conversion, or
    no checkpoint."""
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise ValueError(f"{target} exists and is no folder, allowed: a folder")
    if target.resolve() == source.resolve():
        raise ValueError(f"{target} is what is read, allowed: another folder")
    if not overwrite:
        raise ValueError(
            f"{target} is not empty, allowed: a folder that does not exist yet, or an empty one, or --overwrite"
        )
    if (target / INDEX_NAME).exists():
        try:
            foreign = [name for name in weight_map_of(target / INDEX_NAME) if not _DRAFT_NAME.match(name)]
        except CheckpointError as error:
            raise ValueError(f"{target} cannot be overwritten: {error}") from error
        if foreign:
            raise ValueError(f"{target} holds another model ({few(foreign)}), allowed with --overwrite: a draft")
    elif (target / CONFIG_NAME).exists():
        raise ValueError(f"{target} holds a {CONFIG_NAME} without {INDEX_NAME}, allowed with --overwrite: a draft")


@contextmanager
def writing_to(target: Path, num_bytes: int) -> Iterator[None]:
    """While the target, which was checked, is written: an earlier conversion is removed first, and where writing fails
    everything of the new one. ValueError for too little room on the disk, before anything is touched."""
    check_room(target, num_bytes)
    made = not os.path.lexists(target)
    try:
        target.mkdir(parents=True, exist_ok=True)
        _remove_own(target)
        yield
    except BaseException:
        if made:
            shutil.rmtree(target, ignore_errors=True)
        else:
            _remove_own(target)
        raise


def _remove_own(target: Path) -> None:
    # config.json first: what is left without one is no checkpoint.
    (target / CONFIG_NAME).unlink(missing_ok=True)
    for pattern in _OWN:
        for path in target.glob(pattern):
            path.unlink(missing_ok=True)
