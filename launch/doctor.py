"""`meshspark doctor`: can this machine run the ranks? Imports torch with care, for that may be what is broken."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from ..parallel.topology import BACKENDS
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
TRIAL_RANKS = 2
START_SECONDS = 60
"""For two processes to import torch; the waits of the trial itself end by --timeout."""
MOST_SECONDS = 1e6
"""What an operating system's wait can take."""
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
    add_common(flags, ("control", "record", "trace"))
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
    found = examine(flags, flags.topology.world if place is None else place.local_world)
    write_json(flags.json, found.to_json())
    out = people(flags.json)
    show(out, *(two_columns(title, rows) for title, rows in found.sections.items()))
    for note in found.notes:
        print(f"note: {note}", file=out)
    for problem in found.broken:
        print(f"broken: {problem}", file=out)
    print("all well" if not found.broken else f"{len(found.broken)} broken", file=out)
    return 1 if found.broken else 0


def examine(flags: RunFlags, local_ranks: int) -> Findings:
    """All checks; those that need torch only if it can be imported. local_ranks: the ranks of this machine."""
    found = Findings()
    found.sections["versions"] = {"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}}
    found.sections["environment"] = shown_environment() or {"(none of the variables that matter)": ""}
    problem = torch_problem()
    if problem is not None:
        found.broken.append(problem)
        return found
    found.sections["backends"] = _backends()
    found.sections["devices"] = _devices(flags, local_ranks)
    try:
        check_machine(flags, local_ranks)
    except ValueError as wrong:
        found.broken.append(str(wrong))
    found.sections["checks"] = {
        f"row independence, {flags.numerics}": _row_independence(flags, found),
        "two ranks": _two_ranks(flags, found),
    }
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


def _devices(flags: RunFlags, local_ranks: int) -> dict[str, str]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows = {
        "cpu": f"{usable} of {os.cpu_count()} cores usable, {torch.get_num_threads()} threads, "
        f"capability {torch.backends.cpu.get_cpu_capability()}",
        "cuda": str(device_count("cuda")),
        "npu": str(device_count("npu")),
    }
    for local_rank in range(local_ranks):
        rows[f"local rank {local_rank}"] = flags.device.of(local_rank)
    return rows


def _row_independence(flags: RunFlags, found: Findings) -> str:
    """The self-check's verdict in the dtypes of --numerics. It tries the CPU's products."""
    import torch

    from ..models.numerics import numerics
    from ..models.selfcheck import row_independence

    mode = numerics(flags.numerics)
    if mode.activation == torch.float64:
        return "not tried: float64 promises no equal bits"
    with torch.no_grad():
        verdict = row_independence(modes=(mode,))
    where = "" if flags.device.kind == "cpu" else f" on the CPU; of {flags.device.kind} nothing is promised"
    if verdict["holds"]:
        return f"holds{where}"
    found.notes.append(
        "products on this machine give a row other bits in other company, so ids may differ at ties between "
        f"batches and topologies: {'; '.join(verdict['details'][:3])}"
    )
    return f"does not hold{where}"


def trial_device(flags: RunFlags) -> tuple[str, str]:
    """(--device of two ranks, why it is not the one asked for): the first two devices, or the CPU where there are none.

    gloo tries the host's side of a job on devices too.
    """
    import torch.distributed as dist

    kind, ids = flags.device.kind, flags.device.ids
    if kind == "cpu":
        return "cpu", ""
    present = device_count(kind)
    wanted = tuple(range(TRIAL_RANKS)) if ids is None else ids[:TRIAL_RANKS]
    if not dist.is_backend_available(flags.backend):
        return "cpu", f"{flags.backend} was not tried: this torch has none"
    if len(wanted) < TRIAL_RANKS or max(wanted) >= present:
        return "cpu", (
            f"{flags.backend} was not tried: two ranks need {TRIAL_RANKS} devices, but --device is {flags.device} and "
            f"this process sees {present}"
        )
    return f"{kind}:{','.join(map(str, wanted))}", ""


def _two_ranks(flags: RunFlags, found: Findings) -> str:
    """Two ranks in processes of their own, told from their exit code."""
    device, why_not = trial_device(flags)
    backend = BACKENDS[device.partition(":")[0]]
    wait = min(flags.timeout, MOST_SECONDS)
    seconds = START_SECONDS + 2 * wait
    options = ["--ranks", str(TRIAL_RANKS), "--device", device, "--timeout", str(wait), "--seed", str(flags.seed)]
    options += ["--transport", flags.transport if device == "cpu" else "auto", "--check", flags.check]
    command = [sys.executable, "-P", "-m", "meshspark.launch.exchange", *options]
    if why_not:
        found.notes.append(why_not)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=unranked_environment())
    except subprocess.TimeoutExpired:
        found.broken.append(f"two ranks over {backend} did not end within {seconds:.0f} s")
        return "hang"
    if done.returncode:
        found.broken.append(f"two ranks over {backend} failed: {(done.stderr or done.stdout).strip()[-2000:]}")
        return "failed"
    decision = done.stdout.strip() or f"transport {backend}"
    return f"every exchange bit-equal over {backend} on {device}; {decision}"


if __name__ == "__main__":
    sys.exit(main())
