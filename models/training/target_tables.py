"""The target's embedding and head, read alone from its checkpoint: all of it that a drafter's objective multiplies.

V4's official names, or those of Hub-style checkpoints, so that a draft of another target can be trained from features.
"""

from pathlib import Path

import torch

from ..checkpoint.reader import CheckpointError, Reader, Stored, list_stored
from .objective import TargetTables

EMBEDDING = ("embed.weight", "model.embed_tokens.weight")
HEAD = ("head.weight", "lm_head.weight")
PLAIN = ("BF16", "F16", "F32", "F64")


def find_tables(directory: Path, vocab_size: int, hidden_size: int) -> tuple[Stored, Stored]:
    """Where (embedding, head) lie; no weight is read. CheckpointError for a checkpoint without them, or of other
    sizes."""
    stored, _ = list_stored(directory)
    return tuple(_find(directory, stored, names, (vocab_size, hidden_size)) for names in (EMBEDDING, HEAD))  # type: ignore[return-value]


def _find(directory: Path, stored: dict[str, Stored], names: tuple[str, ...], shape: tuple[int, int]) -> Stored:
    found = [stored[name] for name in names if name in stored]
    if len(found) != 1:
        raise CheckpointError(f"{directory}: has {len(found)} of {', '.join(names)}, allowed: one of them")
    (place,) = found
    if place.shape != shape or place.dtype not in PLAIN:
        raise CheckpointError(
            f"{directory}: {place.name} is {place.dtype} {list(place.shape)}, the draft needs {list(shape)}, "
            f"allowed: {', '.join(PLAIN)}"
        )
    return place


def read_tables(
    directory: Path, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: str = "cpu"
) -> TargetTables:
    """Both whole, in `dtype` on `device`. CheckpointError as `find_tables`."""
    places = find_tables(directory, vocab_size, hidden_size)
    with Reader(directory) as reader:
        embedding, head = (reader.read(place).to(device, dtype, copy=True) for place in places)
    return TargetTables(embedding, head)
