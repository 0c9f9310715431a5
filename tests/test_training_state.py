"""A resumed run is the uninterrupted one bit for bit, and a state that does not fit is refused with what differs."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from placement_scene import build, config, micro_batches, values
from rank_pool import RankPools, to_bytes

from meshspark.models.drafts.contract import resume_contract
from meshspark.models.training import state
from meshspark.models.training.config import ObjectiveConfig
from meshspark.models.training.state import Progress, latest_state, load_state, save_state
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

CONTRACT = {"draft": {"block_size": 3, "target_layer_ids": [1, 3]}, "data": {"digest": "ab", "samples": 12}}


def steps(groups: Groups, core: Any, numbers: range, generator: torch.Generator, compute: torch.dtype) -> list[float]:
    """Steps with noise from a generator, from which a resumed run must draw on."""
    losses = []
    for step in numbers:
        options = {"dtype": compute, "empty": ()}
        batches = micro_batches(step, config(), groups.world.size, groups.world.rank, 3, options)
        for batch in batches:
            noise = torch.randn(batch.features_BSF.shape, generator=generator) + torch.rand(())
            batch.features_BSF.add_(noise, alpha=0.1)
        losses.append(core.step(batches).loss)
    return losses


def begin(groups: Groups, kind: str, dtype: str) -> tuple[Any, Any, torch.Generator]:
    narrow = {"compute_dtype": torch.bfloat16} if dtype == "bfloat16" else {}
    wide = torch.float32 if narrow else getattr(torch, dtype)
    placed, core = build(groups, kind, groups.topology.ep > 1, wide, **narrow)
    torch.manual_seed(40 + groups.world.rank)
    return placed, core, torch.Generator().manual_seed(50 + groups.world.rank)


def interrupted(groups: Groups, folder: str, kind: str, dtype: str) -> None:
    """Three steps and a state."""
    placed, core, generator = begin(groups, kind, dtype)
    steps(groups, core, range(3), generator, getattr(torch, dtype))
    save_state(folder, placed, Progress(3, {"at": groups.world.rank}), CONTRACT, {"noise": generator})


def resumed(groups: Groups, folder: str, kind: str, dtype: str) -> bool:
    """Two steps from the state are those of five in a row, on this rank."""
    placed, core, generator = begin(groups, kind, dtype)
    torch.rand(5)
    progress = load_state(latest_state(folder), placed, CONTRACT, {"noise": generator})
    assert progress == Progress(3, {"at": groups.world.rank})
    core.steps = progress.step
    ends = [(steps(groups, core, range(3, 5), generator, getattr(torch, dtype)), values(placed))]
    placed, core, generator = begin(groups, kind, dtype)
    ends.append((steps(groups, core, range(5), generator, getattr(torch, dtype))[3:], values(placed)))
    packed = [[losses, {name: to_bytes(value) for name, value in found.items()}] for losses, found in ends]
    return packed[0] == packed[1]


def there_and_back(groups: Groups, folder: str, runs: list[list[str]]) -> list[bool]:
    found = []
    for kind, dtype in runs:
        interrupted(groups, f"{folder}/{kind}-{dtype}", kind, dtype)
        found.append(resumed(groups, f"{folder}/{kind}-{dtype}", kind, dtype))
    return found


KINDS = ("ddp", "sharded", "fsdp")


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_resumes_bit_for_bit(tmp_path: Path, kind: str) -> None:
    assert there_and_back(Groups.single(), str(tmp_path), [[kind, "bfloat16"]]) == [True]


def test_two_ranks_resume_bit_for_bit(ranks: RankPools, tmp_path: Path) -> None:
    runs = [["fsdp", "bfloat16"]]
    found = ranks.run(Topology(2), "test_training_state:there_and_back", 120, folder=str(tmp_path), runs=runs)
    assert found == [[True]] * 2
    runs = [["sharded", "bfloat16"]]
    folder = str(tmp_path / "ep")
    found = ranks.run(Topology(2, 1, 2), "test_training_state:there_and_back", 120, folder=folder, runs=runs)
    assert found == [[True]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("topology", [(2, 1, 1), (2, 1, 2), (4, 1, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_new_processes_resume_bit_for_bit(tmp_path: Path, topology: Any, kind: str) -> None:
    for function in ("interrupted", "resumed"):
        pools = RankPools()
        try:
            options = {"folder": str(tmp_path), "kind": kind, "dtype": "bfloat16"}
            found = pools.run(Topology(*topology), f"test_training_state:{function}", 180, **options)
        finally:
            pools.kill()
    assert found == [True] * topology[0]


def saved(tmp_path: Path, kind: str = "ddp") -> tuple[Any, Path]:
    placed, core, generator = begin(Groups.single(), kind, "float32")
    steps(Groups.single(), core, range(1), generator, torch.float32)
    return placed, save_state(tmp_path, placed, Progress(1, {"sample": 7, "of": 12}), CONTRACT)


def test_what_differs_is_named(tmp_path: Path) -> None:
    placed, path = saved(tmp_path)
    other = {
        "draft": {"block_size": 4, "target_layer_ids": [1, 3]},
        "data": {"digest": "ab", "epochs": 1, "samples": 9},
    }
    with pytest.raises(ValueError) as caught:
        load_state(path, placed, other, {"noise": torch.Generator()}, {"of": 13})
    for name in (
        "contract.draft.block_size: saved 3, now 4",
        "contract.data.epochs: saved None, now 1",
        "contract.data.samples: saved 12, now 9",
        "position.of: saved 12, now 13",
        "generators: saved ['torch'], now ['noise', 'torch']",
    ):
        assert name in str(caught.value)
    assert "target_layer_ids" not in str(caught.value) and "digest" not in str(caught.value)
    with pytest.raises(ValueError, match="placement: saved 'ddp', now 'sharded'"):
        load_state(path, begin(Groups.single(), "sharded", "float32")[0], CONTRACT)
    with pytest.raises(
        ValueError, match=r"parameters\.confidence_head\.proj\.weight\.1: |parameters\.fc\.weight: saved"
    ):
        load_state(path, begin(Groups.single(), "ddp", "bfloat16")[0], CONTRACT)
    assert load_state(path, placed, CONTRACT, position={"of": 12}) == Progress(1, {"sample": 7, "of": 12})


def refuse_world(groups: Groups, path: str) -> str:
    placed, _, _ = begin(groups, "ddp", "float32")
    try:
        load_state(path, placed, CONTRACT)
    except ValueError as problem:
        return str(problem)
    return "loaded"


def test_another_world_is_refused(ranks: RankPools, tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    for said in ranks.run(Topology(2), "test_training_state:refuse_world", path=str(path)):
        assert "world.ranks: saved 1, now 2" in said and "world.ep" not in said


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    placed, path = saved(tmp_path)
    before = {name: value.clone() for name, value in values(placed).items()}
    file = path / "rank-00000-of-00001.safetensors"
    data, whole = file.read_bytes(), (path / state.CONTRACT_NAME).read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=f"{len(data) - 1} bytes, the contract says {len(data)}"):
        load_state(path, placed, CONTRACT)
    file.write_bytes(b"\xff" * len(data))
    with pytest.raises(ValueError, match=file.name):
        load_state(path, placed, CONTRACT)
    file.unlink()
    with pytest.raises(ValueError, match="has None bytes"):
        load_state(path, placed, CONTRACT)
    file.write_bytes(data)
    (path / state.CONTRACT_NAME).write_bytes(b"\xc1")
    with pytest.raises(ValueError, match="no msgpack"):
        load_state(path, placed, CONTRACT)
    (path / state.CONTRACT_NAME).write_bytes(msgpack.packb(msgpack.unpackb(whole) | {"format": 2}))
    with pytest.raises(ValueError, match="format 2, allowed: 1"):
        load_state(path, placed, CONTRACT)
    (path / state.CONTRACT_NAME).unlink()
    with pytest.raises(ValueError, match="is no state"):
        load_state(path, placed, CONTRACT)
    assert all(torch.equal(value, before[name]) for name, value in values(placed).items())


def test_a_state_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    placed, path = saved(tmp_path)
    assert latest_state(tmp_path) == path and [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    again = save_state(tmp_path, placed, Progress(1, {"sample": 8}), CONTRACT)
    assert again == path and load_state(path, placed, CONTRACT).position == {"sample": 8}
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    shutil.copytree(path, tmp_path / "step-00000002.partial")
    (tmp_path / "step-00000003").mkdir()
    assert latest_state(tmp_path) == path
    with pytest.raises(ValueError, match="contract is not plain data"):
        save_state(tmp_path, placed, Progress(4), {"tensor": torch.zeros(1)})
    assert latest_state(tmp_path) == path and latest_state(tmp_path / "nowhere") is None


def save_where_one_fails(groups: Groups, folder: str) -> list[str]:
    placed, _, _ = begin(groups, "sharded", "float32")
    write = state._write_tensors

    def fail(path: Path, tensors: Any) -> int:
        raise OSError(28, "No space left on device")

    said = []
    state._write_tensors = fail if groups.world.rank == 1 else write
    try:
        save_state(folder, placed, Progress(1), CONTRACT)
    except (OSError, ValueError) as problem:
        said.append(str(problem))
    finally:
        state._write_tensors = write
    said.append(str(latest_state(folder)))
    said.append(save_state(folder, placed, Progress(1), CONTRACT).name)
    return said


def test_a_full_disk_of_one_rank_ends_the_save_on_all(ranks: RankPools, tmp_path: Path) -> None:
    for said in ranks.run(Topology(2), "test_training_state:save_where_one_fails", folder=str(tmp_path)):
        assert "No space left" in said[0] and said[1:] == ["None", "step-00000001"]


def test_the_contract_of_a_draft_is_one_that_a_state_takes(tmp_path: Path) -> None:
    placed, _, _ = begin(Groups.single(), "ddp", "float32")
    made = [resume_contract(config(), "eager", asdict(ObjectiveConfig(3, 39, num_anchors=n))) for n in (8, 9)]
    path = save_state(tmp_path, placed, Progress(0), made[0])
    assert load_state(path, placed, made[0]).step == 0
    with pytest.raises(ValueError, match=r"another run: contract\.num_anchors: saved 8, now 9$"):
        load_state(path, placed, made[1])
