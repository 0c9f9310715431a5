"""State of a training run: one safetensors file a rank, and a msgpack contract of what it fits and where it goes on.

A state is a folder step-N with rank-R-of-W.safetensors (masters, what the optimiser keeps of them, persistent buffers)
and contract.msgpack. It appears under its name when all of it is written. Resumed, a run takes the same steps bit for
bit; ranks other than those that saved it, or another run, are refused with the names of what differs (training.md 4.5).
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...parallel.group import Group, cpu_tensor
from .placed import Placed
from .state_files import (
    PARTIAL,
    differences,
    gather_bytes,
    listed,
    make_empty,
    packed_bytes,
    replace_folder,
    together,
    write_bytes,
)

FORMAT = 1
CONTRACT_NAME = "contract.msgpack"


@dataclass(frozen=True)
class Progress:
    """Where a run stands: steps taken, and the place of this rank in its data, as plain numbers, strings and lists."""

    step: int
    position: Mapping[str, Any] = field(default_factory=dict)


def save_state(
    folder: Path | str,
    placed: Placed,
    progress: Progress,
    contract: Mapping[str, Any],
    generators: Mapping[str, torch.Generator] | None = None,
) -> Path:
    """Write the state of all ranks between two steps to folder/step-N, which all ranks see; its path. Collective.

    contract: what a resumed run must have alike on all ranks, plain data, as `resume_contract` makes and what the data
    is. Torch's own generators and those of `generators` are saved by rank. A state of the same step is replaced.
    Raises on all ranks alike, OSError or ValueError, and leaves nothing under the state's name then.
    """
    group, final = placed.sums, state_path(folder, progress.step)
    partial = final.with_name(final.name + PARTIAL)
    told = packed_bytes({"position": dict(progress.position)}, "position")
    together(group, lambda: make_empty(partial) if group.rank == 0 else None)
    size = together(group, lambda: _write_tensors(partial / _file_name(group), _tensors(placed)))
    own = {"bytes": size, "rng": _random_states(placed, generators or {}), **msgpack.unpackb(told)}
    ranks = [msgpack.unpackb(blob) for blob in gather_bytes(msgpack.packb(own), group)]
    whole = {**_fits(placed, contract), "step": progress.step, "ranks": ranks}

    def finish() -> None:
        if group.rank == 0:
            write_bytes(partial / CONTRACT_NAME, packed_bytes(whole, "contract"))
            replace_folder(partial, final)

    together(group, finish)
    return final


def load_state(
    path: Path | str,
    placed: Placed,
    contract: Mapping[str, Any],
    generators: Mapping[str, torch.Generator] | None = None,
    position: Mapping[str, Any] | None = None,
) -> Progress:
    """Bring a placed module, its optimiser and the generators to a saved state; where the run goes on. Collective.

    position: entries that this rank's saved position must have, as the number of samples it is counted in. Raises
    ValueError on all ranks alike, before anything is changed, with the name of everything that differs: world,
    placement, parameters, optimiser, contract, position, generators, sizes of files.
    """
    group, folder = placed.sums, Path(path)

    def read() -> tuple[dict[str, Any], dict[str, Tensor]]:
        saved = _read_contract(folder)
        now = _fits(placed, contract)
        problems = list(differences({name: saved.get(name) for name in now}, now))
        # Without the same world there is no file of this rank to look into.
        if not any(line.startswith("world") for line in problems):
            own = saved["ranks"][group.rank]
            known = {name: own["position"].get(name) for name in position or {}}
            problems += differences({"position": known}, {"position": dict(position or {})})
            names = sorted(_random_states(placed, generators or {}))
            problems += differences({"generators": sorted(own["rng"])}, {"generators": names})
        if problems:
            raise ValueError(listed(f"{folder} was saved by another run", problems))
        return saved, _read_tensors(folder / _file_name(group), saved["ranks"][group.rank]["bytes"], placed)

    saved, tensors = together(group, read)
    own = saved["ranks"][group.rank]
    _restore(placed, tensors)
    _set_random_states(placed, own["rng"], generators or {})
    return Progress(saved["step"], own["position"])


def state_path(folder: Path | str, step: int) -> Path:
    """Where the state after this step is."""
    return Path(folder) / f"step-{step:08d}"


def latest_state(folder: Path | str) -> Path | None:
    """The whole state of the latest step, None if there is none."""
    found = sorted(path for path in Path(folder).glob("step-*") if path.suffix != PARTIAL)
    whole = [path for path in found if (path / CONTRACT_NAME).is_file()]
    return whole[-1] if whole else None


def _fits(placed: Placed, contract: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be alike, as plain data."""
    topology = placed.topology
    settings = {k: v for k, v in placed.optimizer.param_groups[0].items() if k not in ("params", "lr")}
    plain = {
        "format": FORMAT,
        "world": {"ranks": topology.world, "tp": topology.tp, "ep": topology.ep},
        "placement": placed.kind,
        "parameters": {name: [*shape, str(placed.compute[name])] for name, shape in placed.shapes.items()},
        "optimizer": {"name": type(placed.optimizer).__name__, **settings},
        "contract": dict(contract),
    }
    return msgpack.unpackb(packed_bytes(plain, "contract"))


def _tensors(placed: Placed) -> dict[str, Tensor]:
    """Everything of this rank by its name in the file. The tensors are the live ones."""
    found: dict[str, Tensor] = {f"master/{name}": master.detach() for name, master in placed.masters.items()}
    for name, master in placed.masters.items():
        for key, value in placed.optimizer.state.get(master, {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer/{key}/{name}"] = value
            elif value is not None:
                kept = f"{type(placed.optimizer).__name__} keeps {key} as {type(value).__name__}"
                raise ValueError(f"{kept}, allowed: tensors")
    return found | {f"buffer/{name}": buffer for name, buffer in _buffers(placed)}


def _buffers(placed: Placed) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in placed.module.named_modules():
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _restore(placed: Placed, tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, master in placed.masters.items():
            master.copy_(tensors[f"master/{name}"])
        for name, buffer in _buffers(placed):
            buffer.copy_(tensors[f"buffer/{name}"])
        placed.optimizer.state.clear()
        for key, value in tensors.items():
            kind, _, rest = key.partition("/")
            if kind == "optimizer":
                entry, _, name = rest.partition("/")
                master = placed.masters[name]
                # The count of steps stays where torch keeps it: on the host.
                placed.optimizer.state[master][entry] = value.to(master.device) if value.ndim else value
        for part in placed.parts:
            part.publish()
            part.zero()


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> int:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size


def _read_tensors(path: Path, size: int, placed: Placed) -> dict[str, Tensor]:
    """The file's tensors if they are those of this rank. ValueError otherwise."""
    there = path.stat().st_size if path.is_file() else None
    if there != size:
        raise ValueError(f"{path} has {there} bytes, the contract says {size}")
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as problem:
        raise ValueError(f"{path}: {problem}") from problem
    live = {n: t for n, t in _tensors(placed).items() if not n.startswith("optimizer/")}
    held = {n: t for n, t in tensors.items() if not n.startswith("optimizer/")}
    found, wanted = ({n: [*t.shape, str(t.dtype)] for n, t in of.items()} for of in (held, live))
    if problems := list(differences(found, wanted)):
        raise ValueError(listed(f"{path} holds other tensors", problems))
    return tensors


def _random_states(placed: Placed, generators: Mapping[str, torch.Generator]) -> dict[str, bytes]:
    states = {"torch": torch.get_rng_state()}
    device = next(iter(placed.masters.values())).device
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if clash := states.keys() & generators.keys():
        raise ValueError(f"generators {sorted(clash)} have names of torch's own")
    states |= {name: generator.get_state() for name, generator in generators.items()}
    return {name: state.numpy().tobytes() for name, state in states.items()}


def _set_random_states(placed: Placed, saved: Mapping[str, bytes], generators: Mapping[str, torch.Generator]) -> None:
    for name, data in saved.items():
        state = cpu_tensor(data)
        if name in generators:
            generators[name].set_state(state)
        elif name == "torch":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, next(iter(placed.masters.values())).device)


def _read_contract(folder: Path) -> dict[str, Any]:
    path = folder / CONTRACT_NAME
    if not path.is_file():
        raise ValueError(f"{folder} is no state: it has no {CONTRACT_NAME}")
    try:
        saved = msgpack.unpackb(path.read_bytes())
    except (ValueError, msgpack.UnpackException) as problem:
        raise ValueError(f"{path} is no msgpack: {problem}") from problem
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        told = saved.get("format") if isinstance(saved, dict) else None
        raise ValueError(f"{path} has format {told!r}, allowed: {FORMAT}")
    return saved


def _file_name(group: Group) -> str:
    return f"rank-{group.rank:05d}-of-{group.size:05d}.safetensors"
