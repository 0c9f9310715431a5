"""Writing sharded safetensors piece by piece: no tensor need be in memory whole."""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

import torch

from .reader import INDEX_NAME, ITEM_BYTES
from .writer import write_json_file

TORCH_DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8, "U8": torch.uint8, "I64": torch.int64,
}  # fmt: skip
"""safetensors' name of a dtype -> torch's."""


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: make() gives its rows in order, in pieces of any number of them, each in its dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Iterable[torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def stream_shards(folder: Path, planned: Sequence[Planned], shard_bytes: int) -> Iterator[tuple[int, int]]:
    """Write the tensors into shards of at most shard_bytes each (one larger tensor fills a shard of its own), then the
    index; after each shard (its number from 1, how many there are).

    make() is called once for each, in the order of `planned` but for wider dtypes, which come first in their shard.
    """
    shards = list(_shards(planned, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, each in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        stream_file(folder / name, each)
        weight_map |= dict.fromkeys((tensor.name for tensor in each), name)
        yield number, len(shards)
    total = sum(tensor.num_bytes for tensor in planned)
    write_json_file(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def stream_file(path: Path, planned: Iterable[Planned]) -> None:
    """Write one safetensors file; it appears under its name only when whole."""
    # Wider dtypes first: then every tensor begins at a multiple of its item's size.
    ordered = sorted(planned, key=lambda tensor: -ITEM_BYTES[tensor.dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in ordered:
            written = sum(file.write(_bytes(piece, tensor)) for piece in tensor.make())
            assert written == tensor.num_bytes, f"{tensor.name}: {written} bytes of {tensor.num_bytes}"
    partial.rename(path)


def _bytes(piece: torch.Tensor, tensor: Planned) -> memoryview:
    assert piece.dtype == TORCH_DTYPES[tensor.dtype], f"{tensor.name}: {piece.dtype}, planned as {tensor.dtype}"
    return piece.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def _shards(planned: Iterable[Planned], shard_bytes: int) -> Iterator[list[Planned]]:
    number = used = 0

    def place(tensor: Planned) -> int:
        nonlocal number, used
        if used and used + tensor.num_bytes > shard_bytes:
            number, used = number + 1, 0
        used += tensor.num_bytes
        return number

    for _, shard in groupby(planned, key=place):
        yield list(shard)
