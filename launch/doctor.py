"""`meshspark doctor`: can this machine run the ranks? Imports torch with care, for that may be what is broken."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from .flags import FlagParser, RunFlags, add_common
from .output import people, show, two_columns, write_json
from .worker import (
    check_machine,
    device_count,
    read_place,
    resolve_here,
    run_main,
    shown_environment,
    unranked_environment,
)

PACKAGES = ("meshspark", "torch", "torch-npu", "numpy", "safetensors", "tokenizers", "msgpack", "rich", "transformers")
EXCHANGE_SECONDS = 120
SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD=0"


@dataclass
class Findings:
    """What was found: sections of names and values, what is broken, and what is worth knowing."""

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"ok": not self.broken, "broken": self.broken, "notes": self.notes, **self.sections}


def parser() -> FlagParser:
    """The verb's flags."""
    flags = FlagParser(prog="meshspark doctor", description=__doc__, allow_abbrev=False)
    add_common(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 if something is broken, 2 for wrong flags."""
    return run_main("doctor", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    place = read_place()
    if place is not None and place.rank > 0:
        return 0
    flags = resolve_here(args)
    found = examine(flags)
    write_json(flags.json, found.to_json())
    out = people(flags.json)
    show(out, *(two_columns(title, rows) for title, rows in found.sections.items()))
    for note in found.notes:
        print(f"note: {note}", file=out)
    for problem in found.broken:
        print(f"broken: {problem}", file=out)
    print("all well" if not found.broken else f"{len(found.broken)} broken", file=out)
    return 1 if found.broken else 0


def examine(flags: RunFlags) -> Findings:
    """All checks; those that need torch only if it can be imported."""
    found = Findings()
    found.sections["versions"] = {"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}}
    found.sections["environment"] = shown_environment() or {"(none of the variables that matter)": ""}
    problem = torch_problem()
    if problem is not None:
        found.broken.append(problem)
        return found
    found.sections["backends"] = _backends()
    found.sections["devices"] = _devices(flags)
    try:
        check_machine(flags, flags.topology.world)
    except ValueError as wrong:
        found.broken.append(str(wrong))
    found.sections["checks"] = {"row independence": _row_independence(found), "two ranks": _two_ranks(found)}
    return found


def torch_problem() -> str | None:
    """Why torch cannot be imported, None if it can."""
    try:
        import torch  # noqa: F401
    except Exception as problem:
        return explain_import(problem)
    return None


def explain_import(problem: Exception) -> str:
    """An import's failure, with the way out where a device extension is at fault."""
    text = f"torch cannot be imported: {type(problem).__name__}: {problem}"
    causes = [str(e) for e in (problem, problem.__cause__, problem.__context__) if e is not None]
    if any("torch_npu" in cause or "backend extension" in cause for cause in causes):
        text += (
            f". torch loads torch_npu on its own and that failed: source CANN's set_env.sh and install the torch-npu "
            f"of torch's own minor version, or run without NPUs with {SWITCH}"
        )
    return text


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _backends() -> dict[str, str]:
    import torch.distributed as dist

    if not dist.is_available():
        return {"torch.distributed": "not built in"}
    available = {name: dist.is_backend_available(name) for name in ("gloo", "nccl", "hccl")}
    return {name: "available" if there else "not available" for name, there in available.items()}


def _devices(flags: RunFlags) -> dict[str, str]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows = {
        "cpu": f"{usable} of {os.cpu_count()} cores usable, {torch.get_num_threads()} threads, "
        f"capability {torch.backends.cpu.get_cpu_capability()}",
        "cuda": str(device_count("cuda")),
        "npu": str(device_count("npu")),
    }
    for local_rank in range(flags.topology.world):
        rows[f"local rank {local_rank}"] = flags.device.of(local_rank)
    return rows


def _row_independence(found: Findings) -> str:
    import torch

    from ..models.selfcheck import row_independence

    verdict: dict[str, Any] = {}
    with torch.no_grad():
        verdict = row_independence()
    if verdict["holds"]:
        return "holds"
    found.notes.append(
        "products on this machine give a row other bits in other company, so ids may differ at ties between "
        f"batches and topologies: {'; '.join(verdict['details'][:3])}"
    )
    return "does not hold"


def _two_ranks(found: Findings) -> str:
    """Two ranks over gloo in processes of their own, told from their exit code."""
    command = [sys.executable, "-P", "-m", "meshspark.launch.exchange", "--ranks", "2", "--timeout", "30"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=EXCHANGE_SECONDS, env=unranked_environment()
        )
    except subprocess.TimeoutExpired:
        found.broken.append(f"two ranks over gloo did not end within {EXCHANGE_SECONDS} s")
        return "hang"
    if done.returncode:
        found.broken.append(f"two ranks over gloo failed: {(done.stderr or done.stdout).strip()[-2000:]}")
        return "failed"
    return "every exchange bit-equal over gloo"


if __name__ == "__main__":
    sys.exit(main())
