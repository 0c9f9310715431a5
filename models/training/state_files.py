"""What saving and loading a state stands on: ranks that fail together, and files that are there whole or not at all."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import torch
from safetensors import SafetensorError

from ...comm.collectives import all_gather_rows
from ...parallel.group import Group, cpu_tensor

PARTIAL = ".partial"
MOST_SHOWN = 12

T = TypeVar("T")


def differences(saved: Any, now: Any, name: str = "") -> Iterator[str]:
    """Lines "name: saved X, now Y" of all leaves of nested mappings that differ; None and absent are one."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in sorted(saved.keys() | now.keys(), key=str):
            yield from differences(saved.get(key), now.get(key), f"{name}.{key}" if name else str(key))
    elif saved != now:
        yield f"{name}: saved {saved!r}, now {now!r}"


def together(group: Group, work: Callable[[], T]) -> T:
    """work() on every rank; where it fails on one, all raise, each its own error or that of the first."""
    problem: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except (OSError, ValueError, SafetensorError) as caught:
        problem = caught
    told = gather_bytes(b"" if problem is None else str(problem).encode() or b"failed", group)
    if problem is not None:
        raise problem
    failed = [f"rank {group.ranks[n]}: {text.decode()}" for n, text in enumerate(told) if text]
    if failed:
        raise ValueError("; ".join(failed[:3]))
    return result  # type: ignore[return-value]


def gather_bytes(blob: bytes, group: Group) -> list[bytes]:
    """Every rank's bytes, of any lengths, by rank."""
    lengths = all_gather_rows(torch.tensor([len(blob)]), group, stage="state_lengths").tolist()
    padded = cpu_tensor(blob + bytes(max(lengths) - len(blob)))
    whole = all_gather_rows(padded, group, stage="state").numpy().tobytes() if max(lengths) else b""
    return [whole[n * max(lengths) :][:length] for n, length in enumerate(lengths)]


def packed_bytes(value: object, what: str) -> bytes:
    """As msgpack; ValueError that names `what` where it is not plain data."""
    try:
        packed: bytes = msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as problem:
        raise ValueError(f"{what} is not plain data: {problem}") from problem
    return packed


def listed(what: str, problems: list[str]) -> str:
    """One line of the first of many problems."""
    more = f"; and {len(problems) - MOST_SHOWN} more" if len(problems) > MOST_SHOWN else ""
    return f"{what}: " + "; ".join(problems[:MOST_SHOWN]) + more


def make_empty(folder: Path) -> None:
    """An empty folder of this name, whatever was there."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_folder(partial: Path, final: Path) -> None:
    """Rename; an older state of the name makes way only then."""
    if final.exists():
        old = final.with_name(final.name + ".old" + PARTIAL)
        if old.exists():
            shutil.rmtree(old)
        final.rename(old)
        partial.rename(final)
        shutil.rmtree(old)
    else:
        partial.rename(final)
