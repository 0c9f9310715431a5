"""A draft as one rank of an expert group holds it, from an official folder or one of ours. training.md 8.7."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...parallel.ownership import expert_slice
from ..checkpoint.reader import INDEX_NAME, Reader, list_stored, read_json_object, weight_map_of
from ..checkpoint.verify import CONFIG_NAME
from ..v4.config import CONFIG_LIMIT
from .configs import draft_json, has_markov, own_shape
from .names import DraftTensor, draft_tensors, without_markov
from .official import Official, open_official, pieces
from .ours import Ours, open_ours
from .variants import PREFIX, official_table, tell_variant


@dataclass(frozen=True)
class LoadedDraft:
    """config: the draft's config.json. tensors: ours by name; stacks hold this rank's experts alone. log: (stored name,
    bytes) of everything that was read."""

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    log: tuple[tuple[str, int], ...]


def load_dspark(
    folder: Path | str, *, ep: int = 1, ep_rank: int = 0, dtype: torch.dtype = torch.bfloat16
) -> LoadedDraft:
    """The draft in a folder of either layout, which its tensors tell; of routed experts only those of ep_rank are read.

    dtype: of the weights, bfloat16 or float32; sinks, routing biases and residual mixes are FP32. From an official
    folder every value is exact. CheckpointError for a faulty folder, ValueError for an ep that does not divide the
    experts.
    """
    path = Path(folder)
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype is {dtype}, allowed: torch.bfloat16, torch.float32")
    index = path / INDEX_NAME
    names = list(weight_map_of(index)) if index.exists() else list(list_stored(path)[0])
    if any(name.startswith(PREFIX) for name in names):
        official = open_official(path, tell_variant(names, path))
        config = draft_json(official.variant, official.shape, official.raw, str(dtype).removeprefix("torch."))
        with official.reader() as reader:
            tensors = _read(draft_tensors(official.table), official, ep, ep_rank, dtype, reader)
            return LoadedDraft(config, tensors, tuple(reader.log))
    ours, config = _open_own(path)
    with ours.reader() as reader:
        tensors = _read(ours.tensors, ours, ep, ep_rank, dtype, reader)
        return LoadedDraft(config, tensors, tuple(reader.log))


def _open_own(path: Path) -> tuple[Ours, dict[str, Any]]:
    config = read_json_object(path / CONFIG_NAME, CONFIG_LIMIT)
    variant, shape = own_shape(config, path / CONFIG_NAME)
    tensors = draft_tensors(official_table(variant, shape))
    return open_ours(path, tensors if has_markov(config) else without_markov(tensors, shape.hidden_size)), config


def _read(
    tensors: tuple[DraftTensor, ...],
    source: Official | Ours,
    ep: int,
    ep_rank: int,
    dtype: torch.dtype,
    reader: Reader,
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        held, experts = tensor, range(1)
        if tensor.is_stack:
            experts = _experts_of(tensor.shape[0], ep, ep_rank)
            held = replace(
                tensor,
                shape=(len(experts), *tensor.shape[1:]),
                experts=tensor.experts[experts.start : experts.stop],
            )
        out = torch.empty(held.shape, dtype=torch.float32 if held.is_wide else dtype)
        rows = out if held.is_stack else out.unsqueeze(0)
        for row, piece in zip(rows, _pieces(held, experts, source, out.dtype, reader), strict=True):
            row.copy_(piece)
        found[tensor.name] = out
    return found


def _pieces(
    tensor: DraftTensor, experts: range, source: Official | Ours, dtype: torch.dtype, reader: Reader
) -> Iterator[torch.Tensor]:
    if isinstance(source, Official):
        yield from pieces(tensor, dtype, source, reader)
    elif tensor.is_stack:
        whole = next(each for each in source.tensors if each.name == tensor.name)
        yield from source.experts_of(whole, experts, reader)
    else:
        yield reader.read(source.stored[tensor.name][0])


def _experts_of(count: int, ep: int, ep_rank: int) -> range:
    if ep < 1 or count % ep or not 0 <= ep_rank < ep:
        raise ValueError(f"ep is {ep} and ep_rank {ep_rank}, allowed: a divisor of the {count} experts, and below it")
    mine = expert_slice(ep_rank, ep, count)
    return range(mine.start, mine.stop)
