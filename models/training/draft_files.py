"""A trained draft on disk: config.json and safetensors shards under the names of its modules, as a Hub-style folder."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..checkpoint.reader import INDEX_NAME, CheckpointError, Reader, few, list_stored
from ..checkpoint.verify import CONFIG_NAME
from ..drafts.build import Draft, build_draft
from ..drafts.config import DraftConfig
from .parts import wide_names
from .placed import Placed

SHARD_BYTES = 5 * 10**9
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def write_draft(folder: Path, config: DraftConfig, placed: Placed, *, writes: bool) -> None:
    """Write the masters' values and persistent buffers in the config's dtype; what stays FP32 in a draft does so here.

    Collective; the rank that `writes` needs room for one shard of SHARD_BYTES. config.json comes last.
    """
    wide, dtype = wide_names(placed.module), DTYPES.get(config.dtype, torch.float32)
    values = ((name, value.to(torch.float32 if name in wide else dtype)) for name, value in placed.whole_parameters())
    buffers = ((name, buffer.detach()) for name, buffer in _persistent(placed.module))
    if not writes:
        for _ in values:
            pass
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).unlink(missing_ok=True)
    parts: list[tuple[Path, list[str]]] = []
    total = 0
    for tensors in _shards(chain(values, buffers)):
        path = folder / f"shard-{len(parts):05d}.partial"
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
        parts.append((path, list(tensors)))
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    for stale in folder.glob("model-*.safetensors"):
        stale.unlink()
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(parts, start=1):
        file_name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        path.rename(folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    _write(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    _write(folder / CONFIG_NAME, config.to_dict())


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    used = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and used + size > SHARD_BYTES:
            yield shard
            shard, used = {}, 0
        shard[name], used = tensor, used + size
    yield shard


def _persistent(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix=prefix, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                yield name, buffer


def _write(path: Path, value: Mapping[str, object]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.rename(path)


def check_draft_files(folder: Path, config: DraftConfig) -> None:
    """CheckpointError unless the folder holds exactly the tensors of such a draft; no weight is read."""
    with torch.device("meta"):
        wanted = {name: tuple(t.shape) for name, t in build_draft(config).state_dict().items()}
    stored, _ = list_stored(folder)
    found = {name: place.shape for name, place in stored.items()}
    wrong = [f"{name} {found[name]}, needed {wanted[name]}" for name in found.keys() & wanted.keys()]
    wrong = sorted(line for line in wrong if line.split(" (")[0] in _differing(found, wanted))
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    for kind, names in (("lacks", missing), ("has besides", extra), ("has of another shape", wrong)):
        if names:
            raise CheckpointError(f"{folder}: {kind} {few(names)}")


def _differing(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> set[str]:
    return {name for name in found.keys() & wanted.keys() if tuple(found[name]) != wanted[name]}


@torch.no_grad()
def load_draft_files(folder: Path, draft: Draft) -> None:
    """Bring a whole draft to the values in a folder that `check_draft_files` has looked at."""
    stored, _ = list_stored(folder)
    with Reader(folder) as reader:
        for name, tensor in draft.state_dict().items():
            tensor.copy_(reader.read(stored[name]))
