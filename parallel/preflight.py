"""Preflight: before any data moves, all ranks compare what must be equal on all of them."""

import json
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from importlib import metadata
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .errors import CollectiveMismatch, CollectiveTimeout, CommError, error_kind, first_line
from .topology import Topology

Fact = str | int | float | None
FACTS_LIMIT = 8 * 1024
MISSING = "(missing)"
GRACE_SECONDS = 2.0
"""How long rank 0, which may own the store, waits for the others to read a bad verdict."""


def compare_facts(
    store: dist.Store,
    topology: Topology,
    rank: int,
    facts: Mapping[str, Fact],
    *,
    told: Mapping[str, Fact] | None = None,
    timeout: float,
) -> list[dict[str, Fact]]:
    """Compare versions, topology and `facts` over the world; what each rank has `told`, by rank.

    Goes through the store alone, so that no backend is started and no group made by ranks that disagree. On any
    difference every rank raises the same CollectiveMismatch with a table of field x rank; facts that are too large
    or no plain values show up as one. Ranks that have not come in `timeout` seconds are named by CollectiveTimeout
    on all that have. What is told is passed on and not compared.
    """
    own = _encode({"facts": {**_own_facts(topology), **{f"fact {k}": v for k, v in facts.items()}}}, told)
    store.set(f"facts/{rank}", own)
    try:
        verdict = _judge(store, topology.world, timeout) if rank == 0 else _hear(store, timeout)
    except RuntimeError as problem:
        kind = error_kind(str(problem))
        raise _error(kind, f"the store: {first_line(problem)}", range(topology.world)) from problem
    if verdict["missing"]:
        text = f"ranks {verdict['missing']} have not started within {timeout:g} s"
        raise _error(CollectiveTimeout, text, verdict["missing"])
    if verdict["differing"]:
        raise _error(CollectiveMismatch, f"ranks differ\n{verdict['differing']}", range(topology.world))
    return list(verdict["told"])


def _judge(store: dist.Store, world: int, timeout: float) -> dict[str, Any]:
    """Rank 0: collect, compare, publish."""
    deadline = time.monotonic() + timeout
    arrived: dict[int, dict[str, dict[str, Fact]]] = {}
    for rank in range(world):
        with suppress(RuntimeError):
            store.wait([f"facts/{rank}"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            arrived[rank] = _decode(store.get(f"facts/{rank}"))
    missing = [rank for rank in range(world) if rank not in arrived]
    table = mismatch_table([entry["facts"] for entry in arrived.values()], list(arrived))
    verdict = {"missing": missing, "differing": table, "told": [entry["told"] for entry in arrived.values()]}
    store.set("verdict", json.dumps(verdict))
    if missing or table:
        ends = time.monotonic() + GRACE_SECONDS
        while store.add("heard", 0) < len(arrived) - 1 and time.monotonic() < ends:
            time.sleep(0.01)
    return verdict


def _hear(store: dist.Store, timeout: float) -> dict[str, Any]:
    """Every other rank: wait for rank 0's verdict, a little longer than it waits itself."""
    try:
        store.wait(["verdict"], timedelta(seconds=timeout + GRACE_SECONDS))
    except RuntimeError as problem:
        if error_kind(str(problem)) is CollectiveTimeout:
            return {"missing": [0], "differing": "", "told": []}
        raise
    verdict: dict[str, Any] = json.loads(store.get("verdict"))
    store.add("heard", 1)
    return verdict


def _error(kind: type[CommError], text: str, ranks: Iterable[int]) -> CommError:
    return kind(text, group="world", sequence=0, op="preflight", stage="start", ranks=ranks)


def _own_facts(topology: Topology) -> dict[str, Fact]:
    return {
        "topology": ", ".join(f"{name} {value}" for name, value in asdict(topology).items()),
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


def _encode(facts: Mapping[str, Any], told: Mapping[str, Fact] | None) -> str:
    """Facts as they travel. The others wait already, so a rank with useless facts shows its trouble in the table."""
    try:
        data = json.dumps({**facts, "told": dict(told or {})})
    except (TypeError, ValueError, RecursionError) as problem:
        return _encode({"facts": {"facts": f"(no plain values: {problem})"}}, None)
    if len(data) > FACTS_LIMIT:
        return _encode({"facts": {"facts": f"({len(data)} characters, allowed: {FACTS_LIMIT})"}}, None)
    return data


def _decode(data: bytes) -> dict[str, dict[str, Fact]]:
    """What one rank sent; peers are not trusted to send anything but flat maps."""
    try:
        entry = json.loads(data)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), dict) for key in ("facts", "told")):
        return {"facts": {"facts": "(unreadable)"}, "told": {}}
    return {key: {str(name): value for name, value in entry[key].items()} for key in ("facts", "told")}


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
