"""Reading sharded safetensors as untrusted data: the index, the headers, then slices of mapped files.

Headers are checked here against the files' sizes before safetensors opens them; the data itself comes through
safetensors, mapped and not copied.
"""

import json
import struct
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open

from .shown import shown, shown_value

INDEX_NAME = "model.safetensors.index.json"
INDEX_LIMIT = 64 << 20
HEADER_LIMIT = 100 << 20
FIRST_FEW = 5
MAX_DIMS = 8
MAX_COUNT = 1 << 62
"""Offsets and sizes beyond it are no file's."""


ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
"""Dtype names of safetensors that can be here at all, with their widths."""


class CheckpointError(ValueError):
    """A checkpoint that is not what it should be; the message names the file or tensors and what is allowed."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: its shard's file name, stored name, safetensors dtype and shape, and bytes."""

    shard: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def few(names: list[str]) -> str:
    """The first few names and how many more there are."""
    more = f" and {len(names) - FIRST_FEW} more" if len(names) > FIRST_FEW else ""
    return ", ".join(map(shown, names[:FIRST_FEW])) + more


def read_json_object(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes; CheckpointError for anything else, repeated keys too."""
    try:
        # Pipes and devices would block, or never end.
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: not a file")
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(f"{path}: {size} bytes, allowed: at most {limit}")
        with path.open("rb") as file:
            # No more than that, even if the file grows.
            data = file.read(limit)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_json_object(data, str(path))


def parse_json_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in data; CheckpointError naming `what` otherwise."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(pairs, what))
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: a JSON {type(value).__name__}, allowed: an object")
    return value


def list_stored(
    directory: Path, prefix: str = "", root: Path | None = None
) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """(stored name -> place, notes) of all tensors of a checkpoint folder, from its index and headers.

    prefix: only of tensors whose names begin so; shards that hold none of them need not be there, and are not opened.
    root: see `inside`. Raises CheckpointError for shards that are absent, outside of the folder or damaged, for index
    entries whose tensor is absent, for tensors in two shards or in none of the index, and for several shards without
    an index.
    """
    index_path = directory / INDEX_NAME
    on_disk = sorted(path.name for path in directory.glob("*.safetensors"))
    if not index_path.exists():
        found, notes = _list_single(directory, on_disk)
        return _beginning(found, prefix), notes
    weight_map = weight_map_of(index_path, prefix)
    headers = {name: read_header(inside(directory, name, root)) for name in sorted(set(weight_map.values()))}
    headers = {shard: _beginning(header, prefix) for shard, header in headers.items()}
    found = _merge(headers, directory)
    absent = [f"{name} in {shard}" for name, shard in weight_map.items() if name not in headers[shard]]
    if absent:
        raise CheckpointError(f"{index_path}: entries whose tensor is not in its shard: {few(absent)}")
    unlisted = [f"{name} in {stored.shard}" for name, stored in found.items() if name not in weight_map]
    if unlisted:
        raise CheckpointError(f"{index_path}: lacks tensors that its shards hold: {few(unlisted)}")
    stray = [] if prefix else [name for name in on_disk if name not in headers]
    notes = (f"ignored, not in the index: {few(stray)}",) if stray else ()
    return found, notes


def _beginning(header: dict[str, Stored], prefix: str) -> dict[str, Stored]:
    return {name: stored for name, stored in header.items() if name.startswith(prefix)}


def check_file_name(name: str, directory: Path | str) -> None:
    """CheckpointError unless a name out of an index is that of a file beside it."""
    plain = name.isascii() and name.isprintable() and not set(name) & set("/\\")
    if not plain or name in ("", ".", ".."):
        raise CheckpointError(f"{directory}: the index names {shown_value(name)}, allowed: plain file names in it")


def inside(directory: Path, name: str, root: Path | None = None) -> Path:
    """The path of a file that an index names; CheckpointError unless it is a plain file of the folder itself.

    root: a folder around it in which links may end, as those of a download's cache do; by default the folder itself.
    """
    check_file_name(name, directory)
    path = directory / name
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # Python 3.11 and 3.12 call a ring of links a RuntimeError.
        raise CheckpointError(f"{directory}: shard {shown(name)} of the index is absent or cannot be opened") from error
    if not real.is_relative_to((root or directory).resolve()):
        raise CheckpointError(f"{path}: leads out of the folder to {real}, allowed: files inside it")
    if not real.is_file():
        raise CheckpointError(f"{path}: not a file")
    return path


def read_header(path: Path) -> dict[str, Stored]:
    """Name -> place of the tensors of one safetensors file, offsets and sizes checked against the file's."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(8)
            if len(head) < 8:
                raise CheckpointError(f"{path}: {size} bytes, shorter than a safetensors header")
            (length,) = struct.unpack("<Q", head)
            if length > HEADER_LIMIT or 8 + length > size:
                raise CheckpointError(f"{path}: header of {length} bytes in a file of {size}, cut off or damaged")
            header = parse_json_object(file.read(length), f"{path}: header")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is {shown_value(metadata)}, allowed: an object of texts")
    spans = {name: _entry(path, name, entry) for name, entry in header.items()}
    _check_spans(path, [(start, stop, name) for name, (start, stop, _) in spans.items()], size - 8 - length)
    return {name: stored for name, (_, _, stored) in spans.items()}


class Reader:
    """Slices of stored tensors, through memory maps that live until close(). `log` holds (name, bytes) per read.

    window: bytes read after which the maps are let go, so that what was read does not stay resident (None: never).
    root: see `inside`.
    """

    def __init__(self, directory: Path, *, window: int | None = None, root: Path | None = None) -> None:
        self.directory, self.root = directory, root
        self.log: list[tuple[str, int]] = []
        self._window, self._seen = window, 0
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the maps; tensors read before keep what they need."""
        for handle in self._open.values():
            with suppress(OSError):
                handle.__exit__(None, None, None)
        self._open.clear()

    def read(self, stored: Stored, slices: tuple[slice, ...] = ()) -> torch.Tensor:
        """The tensor, or these index ranges of it, in its stored dtype: a view of the mapped file to read only."""
        try:
            if self._window is not None and self._seen > self._window:
                self.close()
                self._seen = 0
            if stored.shard not in self._open:
                path = inside(self.directory, stored.shard, self.root)
                self._open[stored.shard] = safe_open(str(path), framework="pt", device="cpu").__enter__()
            whole = self._open[stored.shard].get_slice(stored.name)
            tensor: torch.Tensor = whole[slices or ...]
        except CheckpointError:
            raise
        except Exception as error:
            # safetensors raises its own class, OSError or RuntimeError according to what it finds.
            raise CheckpointError(f"{self.directory / stored.shard}: {stored.name} cannot be read: {error}") from error
        self._seen += tensor.nbytes
        self.log.append((stored.name, tensor.nbytes))
        return tensor


def _unique(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        repeated = [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
        raise CheckpointError(f"{what}: names repeated: {few(repeated)}")
    return result


def weight_map_of(index_path: Path, prefix: str = "") -> dict[str, str]:
    """Name -> shard of the tensors of an index whose names begin so; CheckpointError where it has no map of texts."""
    weight_map = read_json_object(index_path, INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: weight_map is absent or empty, allowed: an object of name -> file")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{index_path}: {shown(name)} -> {shown_value(shard)}, allowed: a file name")
    return {name: shard for name, shard in weight_map.items() if name.startswith(prefix)}


def _list_single(directory: Path, on_disk: list[str]) -> tuple[dict[str, Stored], tuple[str, ...]]:
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such folder")
    if not on_disk:
        raise CheckpointError(f"{directory}: holds no safetensors file")
    if len(on_disk) > 1:
        raise CheckpointError(f"{directory}: {len(on_disk)} shards ({few(on_disk)}) but no {INDEX_NAME}")
    return read_header(inside(directory, on_disk[0])), ()


def _merge(headers: dict[str, dict[str, Stored]], directory: Path) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    twice: list[str] = []
    for header in headers.values():
        twice += [f"{name} in {found[name].shard} and {s.shard}" for name, s in header.items() if name in found]
        found |= header
    if twice:
        raise CheckpointError(f"{directory}: tensors in two shards: {few(twice)}")
    return found


def _entry(path: Path, name: str, entry: Any) -> tuple[int, int, Stored]:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: header entry of {shown(name)} is no object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: {shown(name)} has dtype {shown_value(dtype)}, allowed: {sorted(ITEM_BYTES)}")
    shape, offsets = (_counts(path, name, key, entry.get(key)) for key in ("shape", "data_offsets"))
    if len(offsets) != 2:
        raise CheckpointError(f"{path}: {shown(name)} has data_offsets {shown_value(offsets)}, allowed: two of them")
    start, stop = offsets
    num_bytes = prod(shape) * ITEM_BYTES[dtype]
    if stop - start != num_bytes:
        raise CheckpointError(f"{path}: {shown(name)} has {stop - start} bytes, {dtype} of {shape} takes {num_bytes}")
    return start, stop, Stored(path.name, name, dtype, shape, num_bytes)


def _counts(path: Path, name: str, key: str, value: Any) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) > MAX_DIMS
        or not all(type(v) is int and 0 <= v <= MAX_COUNT for v in value)
    ):
        raise CheckpointError(
            f"{path}: {shown(name)} has {key} {shown_value(value)}, "
            f"allowed: at most {MAX_DIMS} whole numbers from 0 to {MAX_COUNT}"
        )
    return tuple(value)


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    end, before = 0, "the header"
    for start, stop, name in sorted(spans):
        if start < end:
            raise CheckpointError(f"{path}: {shown(name)} overlaps {shown(before)}: it starts at {start}, before {end}")
        if start > end:
            raise CheckpointError(f"{path}: a gap of {start - end} bytes between {shown(before)} and {shown(name)}")
        end, before = stop, name
    if end != data_bytes:
        what = "shorter" if end > data_bytes else "longer"
        raise CheckpointError(f"{path}: the file is {what} than its header says: {data_bytes} bytes of data, not {end}")
