"""Preflight: before any data moves, all ranks compare what must be equal on all of them."""

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING

import msgpack
import numpy as np
import torch
import torch.distributed as dist

from .errors import CollectiveMismatch
from .group import Group, cpu_tensor

if TYPE_CHECKING:
    from .groups import Groups

Fact = str | int | float | None
FACTS_LIMIT = 64 * 1024
MISSING = "(missing)"


def preflight(groups: "Groups", facts: Mapping[str, Fact]) -> None:
    """Compare versions, topology and the caller's facts over the world.

    On any difference every rank raises the same CollectiveMismatch with a table of field x rank; facts that are
    too large or no plain values show up as one.
    """
    compare_facts(groups.control, facts)


def compare_facts(group: Group, facts: Mapping[str, Fact]) -> None:
    """As `preflight`, over one CPU group: lengths first, then msgpack bytes padded to the longest."""
    if group.size == 1:
        return
    own = _encode({**_own_facts(group), **{f"fact {name}": value for name, value in facts.items()}})
    with group.call("preflight", "start", dtype="uint8", columns=len(own)):
        lengths = torch.zeros(group.size, dtype=torch.int64)
        dist.all_gather(list(lengths.split(1)), torch.tensor([len(own)]), group=group.process_group)
        longest = int(lengths.max())
        if longest > FACTS_LIMIT or int(lengths.min()) < 1:
            raise group.error(
                CollectiveMismatch,
                f"facts are {lengths.tolist()} bytes by rank, allowed: 1 to {FACTS_LIMIT}",
                "preflight",
                "start",
            )
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = cpu_tensor(own)
        received = [torch.empty_like(padded) for _ in group.ranks]
        dist.all_gather(received, padded, group=group.process_group)
        pieces = zip(received, lengths.tolist(), strict=True)
        table = mismatch_table([_decode(row.numpy()[:length].tobytes()) for row, length in pieces], group.ranks)
        if table:
            raise group.error(CollectiveMismatch, f"ranks differ\n{table}", "preflight", "start")


def _own_facts(group: Group) -> dict[str, Fact]:
    sizes = ", ".join(f"{name} {value}" for name, value in asdict(group.topology).items())
    return {
        "topology": sizes,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "meshspark": _version(),
        "byte order": sys.byteorder,
    }


def _version() -> str:
    try:
        return metadata.version("meshspark")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _encode(facts: Mapping[str, Fact]) -> bytes:
    try:
        data: bytes = msgpack.packb(dict(facts))
    except (TypeError, ValueError, OverflowError) as problem:
        # The others are already waiting, so this rank takes part and shows its trouble in the table.
        data = msgpack.packb({"facts": f"(no plain values: {problem})"})
    return data


def _decode(data: bytes) -> dict[str, Fact]:
    """The facts of one rank; peers are not trusted to send anything but a flat map."""
    try:
        facts = msgpack.unpackb(data)
    except (ValueError, msgpack.exceptions.UnpackException):
        return {"facts": "(unreadable)"}
    if not isinstance(facts, dict):
        return {"facts": "(not a map)"}
    return {str(name): value for name, value in facts.items()}


def mismatch_table(facts_by_rank: Sequence[Mapping[str, Fact]], ranks: Sequence[int]) -> str:
    """The fields that differ, one line each, one column per rank; empty if all ranks agree."""
    names = list(dict.fromkeys(name for facts in facts_by_rank for name in facts))
    rows = [[name, *(_show(facts.get(name, MISSING)) for facts in facts_by_rank)] for name in names]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return ""
    lines = [["field", *(f"rank {rank}" for rank in ranks)], *differing]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _show(value: Fact) -> str:
    return value if isinstance(value, str) else repr(value)
