"""Feature files: captured states of many samples as safetensors shards and a msgpack index, training.md 7.7.

A shard holds the tokens of its samples one after the other: input_ids [T] int32, hidden_states [T, F] BF16,
target_last_hidden_states [T, H] BF16 where a teacher is declared, loss_mask [T] uint8. The index says what the states
are (FeatureSpec), of which target and data, and the samples' lengths; it is written last.
Letters: T tokens of a shard, S of a sample, F features, H hidden.
"""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
import torch
from safetensors import safe_open

from ..checkpoint.reader import inside, read_header
from .capture import Features
from .feature_spec import FeatureSpec
from .token_files import TokenSample, has_anchor

INDEX_NAME = "features.msgpack"
INDEX_LIMIT = 1 << 30
SCHEMA = 1
SHARD_BYTES = 4 << 30
MOST_TOKENS = 1 << 40
IDS, MASK, STATES, LAST = "input_ids", "loss_mask", "hidden_states", "target_last_hidden_states"
DTYPES = {IDS: ("I32", torch.int32), STATES: ("BF16", torch.bfloat16), LAST: ("BF16", torch.bfloat16)}
DTYPES[MASK] = ("U8", torch.uint8)
ITEM = {IDS: 4, STATES: 2, LAST: 2, MASK: 1}


@dataclass(frozen=True)
class Shard:
    """A run of samples that lie in one file: the first one's place among all, their lengths."""

    name: str
    first: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class FeaturePlan:
    """Where every sample will lie, and what all of it will take, known before anything is written."""

    spec: FeatureSpec
    shards: tuple[Shard, ...]
    target: str
    data: str
    index: bytes = field(repr=False, default=b"")

    @property
    def num_bytes(self) -> int:
        """Of all files, to the byte."""
        return len(self.index) + sum(len(header(self.spec, s)) + s.tokens * token_bytes(self.spec) for s in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


def token_bytes(spec: FeatureSpec) -> int:
    """Bytes of a token with its id and mask: 2 H (m + 1) + 5 with a teacher."""
    return spec.row_bytes + ITEM[IDS] + ITEM[MASK]


def plan_features(
    spec: FeatureSpec, lengths: Sequence[int], *, target: str, data: str, shard_bytes: int = SHARD_BYTES
) -> FeaturePlan:
    """Samples of these lengths in shards of at most shard_bytes of states each; one sample may exceed it.

    target and data: digests of what they come from, kept in the index.
    """
    runs: list[list[int]] = [[]]
    for length in lengths:
        if runs[-1] and (sum(runs[-1]) + length) * token_bytes(spec) > shard_bytes:
            runs.append([])
        runs[-1].append(length)
    first, shards = 0, []
    for number, run in enumerate(runs):
        shards.append(Shard(f"features-{number:05d}.safetensors", first, tuple(run)))
        first += len(run)
    plan = FeaturePlan(spec, tuple(shards), target, data)
    return FeaturePlan(spec, plan.shards, target, data, _index(plan))


def _index(plan: FeaturePlan) -> bytes:
    lengths = np.array([n for shard in plan.shards for n in shard.lengths], dtype="<i4")
    packed: bytes = msgpack.packb(
        {
            "schema": SCHEMA,
            **plan.spec.to_dict(),
            "target": plan.target,
            "data": plan.data,
            "samples": len(lengths),
            "tokens": plan.tokens,
            "lengths": lengths.tobytes(),
            "shards": [[shard.name, len(shard.lengths)] for shard in plan.shards],
        }
    )
    return packed


def _layout(spec: FeatureSpec, tokens: int) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Tensor -> (bytes before it, shape)."""
    shapes: dict[str, tuple[int, ...]] = {IDS: (tokens,), STATES: (tokens, spec.width)}
    if spec.teacher:
        shapes[LAST] = (tokens, spec.hidden_size)
    shapes[MASK] = (tokens,)
    found, at = {}, 0
    for name, shape in shapes.items():
        found[name] = (at, shape)
        at += ITEM[name] * int(np.prod(shape, dtype=np.int64))
    return found


def header(spec: FeatureSpec, shard: Shard) -> bytes:
    """The safetensors header of a shard, its length in front."""
    entries = {}
    for name, (at, shape) in _layout(spec, shard.tokens).items():
        end = at + ITEM[name] * int(np.prod(shape, dtype=np.int64))
        entries[name] = {"dtype": DTYPES[name][0], "shape": list(shape), "data_offsets": [at, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class ShardWriter:
    """Writes one shard, sample after sample; the file has its name only once it is whole."""

    def __init__(self, folder: Path, spec: FeatureSpec, shard: Shard) -> None:
        self._path, self._partial = folder / shard.name, folder / f"{shard.name}.partial"
        self._spec, self._shard, self._done, self._row = spec, shard, 0, 0
        self._layout = _layout(spec, shard.tokens)
        head = header(spec, shard)
        self._start = len(head)
        self._file: BinaryIO = self._partial.open("wb")
        self._file.write(head)
        self._file.truncate(self._start + shard.tokens * token_bytes(spec))

    def add(self, sample: TokenSample, features: Features) -> None:
        """The next sample of the shard."""
        length = self._shard.lengths[self._done]
        parts = {IDS: torch.from_numpy(sample.input_ids), MASK: torch.from_numpy(sample.loss_mask)}
        parts[STATES] = features.hidden_states
        if self._spec.teacher:
            assert features.last_hidden_states is not None
            parts[LAST] = features.last_hidden_states
        for name, (at, shape) in self._layout.items():
            rows = parts[name].detach().cpu().contiguous()
            if rows.shape != (length, *shape[1:]) or rows.dtype != DTYPES[name][1]:
                raise ValueError(
                    f"{name} of sample {self._shard.first + self._done} is {rows.dtype} {list(rows.shape)}, "
                    f"allowed: {DTYPES[name][1]} {[length, *shape[1:]]}"
                )
            row_bytes = ITEM[name] * int(np.prod(shape[1:], dtype=np.int64))
            self._file.seek(self._start + at + self._row * row_bytes)
            self._file.write(rows.view(torch.uint8).numpy().tobytes() if length else b"")
        self._done += 1
        self._row += length

    def close(self) -> None:
        """All samples are there: give the file its name."""
        assert self._done == len(self._shard.lengths), f"{self._done} of {len(self._shard.lengths)} samples"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.rename(self._path)

    def drop(self) -> None:
        """Leave nothing of a shard that is not whole."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


def write_index(folder: Path, plan: FeaturePlan) -> None:
    """Last of all, once every shard is there: it makes the folder readable."""
    partial = folder / f"{INDEX_NAME}.partial"
    partial.write_bytes(plan.index)
    partial.rename(folder / INDEX_NAME)


class FeatureFiles:
    """A folder of features, read at random; states are views of mapped files.

    spec, target, data as written; lengths: tokens of every sample.
    """

    def __init__(self, folder: Path) -> None:
        """Checks index, headers, sizes, ids and masks of all shards. ValueError naming file and field."""
        self.folder, self._path = folder, folder / INDEX_NAME
        raw = self._read_index()
        try:
            self.spec = FeatureSpec.from_dict(raw)
        except ValueError as problem:
            raise ValueError(f"{self._path}: {problem}") from problem
        self.target, self.data = (self._text(raw, name) for name in ("target", "data"))
        self.lengths = self._lengths(raw)
        self._shards, self._tensors = self._open(raw)
        self._places = [(s, row) for s, shard in enumerate(self._shards) for row in _starts(shard.lengths)]
        for index in range(len(self)):
            self._check(index)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample: input_ids [1, S] int32, loss_mask [1, S] uint8, hidden_states [1, S, F] and, with a teacher,
        target_last_hidden_states [1, S, H] in BF16."""
        shard, row = self._places[index]
        rows = slice(row, row + self.lengths[index])
        return {name: tensor[rows][None] for name, tensor in self._tensors[shard].items()}

    def _read_index(self) -> dict[str, Any]:
        if not self._path.is_file():
            raise ValueError(f"{self._path}: there is no such file; allowed: a folder that `meshspark features` wrote")
        size = self._path.stat().st_size
        if size > INDEX_LIMIT:
            raise ValueError(f"{self._path} has {size} bytes, allowed: at most {INDEX_LIMIT}")
        try:
            raw = msgpack.unpackb(self._path.read_bytes())
        except (ValueError, msgpack.UnpackException) as problem:
            raise ValueError(f"{self._path}: is no msgpack: {problem}") from problem
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise ValueError(f"{self._path}: is no index of features of schema {SCHEMA}")
        return raw

    def _text(self, raw: Mapping[str, Any], name: str) -> str:
        value = raw.get(name)
        if not isinstance(value, str):
            raise ValueError(f"{self._path}: {name} is {value!r}, allowed: a text")
        return value

    def _lengths(self, raw: Mapping[str, Any]) -> list[int]:
        packed, samples, tokens = raw.get("lengths"), raw.get("samples"), raw.get("tokens")
        if not isinstance(packed, bytes) or type(samples) is not int or len(packed) != 4 * samples or not samples:
            raise ValueError(f"{self._path}: lengths are not those of {samples!r} samples, allowed: 1 or more")
        lengths: list[int] = np.frombuffer(packed, dtype="<i4").tolist()
        if min(lengths) < 1 or sum(lengths) != tokens or sum(lengths) > MOST_TOKENS:
            raise ValueError(
                f"{self._path}: lengths from {min(lengths)} sum up to {sum(lengths)}, declared: {tokens!r}"
            )
        return lengths

    def _open(self, raw: Mapping[str, Any]) -> tuple[list[Shard], list[dict[str, torch.Tensor]]]:
        listed, first, shards, tensors = raw.get("shards"), 0, [], []
        for entry in listed if isinstance(listed, list) else ():
            pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and type(entry[1]) is int
            if not pair or not 0 < entry[1] <= len(self.lengths) - first:
                raise ValueError(f"{self._path}: a shard is {entry!r}, allowed: [file name, samples]")
            shards.append(Shard(entry[0], first, tuple(self.lengths[first : first + entry[1]])))
            first += entry[1]
            tensors.append(self._mapped(shards[-1]))
        if first != len(self.lengths):
            raise ValueError(f"{self._path}: shards hold {first} samples, declared: {len(self.lengths)}")
        return shards, tensors

    def _mapped(self, shard: Shard) -> dict[str, torch.Tensor]:
        path = inside(self.folder, shard.name)
        layout, stored = _layout(self.spec, shard.tokens), read_header(path)
        found = {name: (entry.dtype, entry.shape) for name, entry in stored.items()}
        wanted = {name: (DTYPES[name][0], shape) for name, (_, shape) in layout.items()}
        if found != wanted:
            raise ValueError(f"{path}: holds {found}, declared in {INDEX_NAME}: {wanted}")
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in layout}

    def _check(self, index: int) -> None:
        sample, where = self[index], f"{self.folder / self._shards[self._places[index][0]].name}: sample {index}"
        ids, mask = sample[IDS], sample[MASK]
        if int(ids.min()) < 0 or int(ids.max()) >= self.spec.vocab_size:
            raise ValueError(
                f"{where}: ids {int(ids.min())} to {int(ids.max())}, allowed: 0 to {self.spec.vocab_size - 1}"
            )
        if int(mask.max()) > 1:
            raise ValueError(f"{where}: loss_mask holds {int(mask.max())}, allowed: 0 and 1")
        if not has_anchor(mask[0].numpy()):
            raise ValueError(f"{where}: no two tokens in a row are learned, allowed: one such pair or more")


def _starts(lengths: Sequence[int]) -> list[int]:
    """The row of each sample in its shard."""
    ends = np.cumsum(lengths)
    return [0, *ends[:-1].tolist()]
