"""A draft's own folder: the tensors of names.py in safetensors, stacks whole or in slices of experts.

A stack that was written in N slices is N tensors, named after it with .0ofN, .1ofN, ... at the end.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..checkpoint.reader import CheckpointError, Reader, Stored, few, list_stored
from .names import DraftTensor, Place
from .official import PLAIN_DTYPES, WINDOW

_SLICE = re.compile(r"(?P<name>.+)\.(?P<index>\d+)of(?P<count>\d+)")


@dataclass(frozen=True)
class Ours:
    """A verified draft's folder. stored: name -> places of its slices in order, one of them where it is whole."""

    folder: Path
    tensors: tuple[DraftTensor, ...]
    stored: Mapping[str, tuple[Stored, ...]]

    def reader(self) -> Reader:
        """A reader of its shards that lets go of what was read."""
        return Reader(self.folder, window=WINDOW)

    def experts_of(self, tensor: DraftTensor, wanted: range, reader: Reader) -> Iterable[torch.Tensor]:
        """Those experts of a stack, one after the other, as stored; nothing else is read."""
        slices = self.stored[tensor.name]
        size = tensor.shape[0] // len(slices)
        for expert in wanted:
            inner = expert % size
            yield reader.read(slices[expert // size], (slice(inner, inner + 1),))[0]

    def read(self, place: Place, reader: Reader) -> torch.Tensor:
        """What an official tensor is made of, as stored. CheckpointError for NaN and infinity."""
        if place.expert is None:
            weight = reader.read(self.stored[place.tensor.name][0])
        else:
            (expert,) = self.experts_of(place.tensor, range(place.expert, place.expert + 1), reader)
            weight = expert[place.rows]
        if not all(bool(torch.isfinite(end)) for end in weight.aminmax()):
            raise CheckpointError(f"{self.folder}: {place.tensor.name} holds NaN or infinity")
        return weight


def sliced_names(tensor: DraftTensor, count: int) -> list[tuple[str, range]]:
    """(name, its experts) of each slice of a stack; the stack's own name where count is 1."""
    size = tensor.shape[0] // count
    if count == 1:
        return [(tensor.name, range(size))]
    return [(f"{tensor.name}.{i}of{count}", range(i * size, (i + 1) * size)) for i in range(count)]


def open_ours(folder: Path, tensors: tuple[DraftTensor, ...]) -> Ours:
    """Verify names, shapes and dtypes of a draft's folder; no weight is read.

    Weights are BF16 or FP32. CheckpointError with every kind of fault found and the first few names of each.
    """
    stored, _ = list_stored(folder)
    by_stack = _by_stack(stored)
    kinds: dict[str, list[str]] = {"missing": [], "unexpected": [], "of wrong shape": [], "of wrong dtype": []}
    found: dict[str, tuple[Stored, ...]] = {}
    for tensor in tensors:
        parts = by_stack.pop(tensor.name, {}) if tensor.is_stack else {}
        if tensor.name in stored:
            kinds["unexpected"] += [each.name for count in parts.values() for each in count.values()]
            found[tensor.name] = (stored[tensor.name],)
        elif len(parts) == 1:
            ((count, each),) = parts.items()
            wanted = [name for name, _ in sliced_names(tensor, count)] if tensor.shape[0] % count == 0 else []
            kinds["missing"] += [name for name in wanted if name not in stored]
            kinds["unexpected"] += [part.name for part in each.values() if part.name not in wanted]
            found[tensor.name] = tuple(stored[name] for name in wanted if name in stored)
        else:
            kinds["missing" if not parts else "unexpected"] += [
                part.name for each in parts.values() for part in each.values()
            ] or [tensor.name]
        for each_stored in found.get(tensor.name, ()):
            _compare(tensor, each_stored, len(found[tensor.name]), kinds)
    known = {each.name for places in found.values() for each in places}
    listed = {name for names in kinds.values() for name in names}
    kinds["unexpected"] += [name for name in stored if name not in known and name not in listed]
    wrong = [f"{kind} ({len(names)}): {few(names)}" for kind, names in kinds.items() if names]
    if wrong:
        raise CheckpointError(f"{folder}: tensors do not fit the draft: {'; '.join(wrong)}")
    return Ours(folder, tensors, found)


def _by_stack(stored: Mapping[str, Stored]) -> dict[str, dict[int, dict[int, Stored]]]:
    """Name of a stack -> number of slices -> index -> place, of all names that are a slice's."""
    found: dict[str, dict[int, dict[int, Stored]]] = {}
    for name, place in stored.items():
        match = _SLICE.fullmatch(name)
        # Longer numbers are no slice's; they are left to be unexpected.
        if match and len(match["index"] + match["count"]) < 10 and int(match["count"]) > 0:
            found.setdefault(match["name"], {}).setdefault(int(match["count"]), {})[int(match["index"])] = place
    return found


def _compare(tensor: DraftTensor, stored: Stored, count: int, kinds: dict[str, list[str]]) -> None:
    shape = (tensor.shape[0] // count, *tensor.shape[1:]) if tensor.is_stack else tensor.shape
    if stored.shape != shape:
        kinds["of wrong shape"].append(f"{stored.name} {stored.shape}, allowed {shape}")
    if stored.dtype not in PLAIN_DTYPES:
        kinds["of wrong dtype"].append(f"{stored.name} {stored.dtype}, allowed {' or '.join(PLAIN_DTYPES)}")
