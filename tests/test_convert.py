"""convert w8a8: the same bits from either folder, faults of both refused, nothing left of a conversion that fails."""

import json
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import checkpoint_faults as faults
import pytest
import torch
from full_disk import fail_second_shard
from safetensors.torch import load_file
from test_loader_memory import MIB, STATUS, peak_rise, wide_config
from test_loading_w8a8 import SMALL, assert_equal_weights

from meshspark.launch import cli
from meshspark.models.checkpoint.convert import convert_w8a8
from meshspark.models.checkpoint.inventory import inventory
from meshspark.models.checkpoint.loader import load_on_all_ranks, load_weights
from meshspark.models.checkpoint.reader import CheckpointError
from meshspark.models.checkpoint.synthetic import synthesize
from meshspark.models.checkpoint.verify import open_checkpoint
from meshspark.models.numerics import BFLOAT16, FLOAT32, W8A8
from meshspark.models.v4.config import DSparkFields
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

SEED = 11
CODES, SCALE, WO_B = "layers.1.attn.wq_b.weight", "layers.1.attn.wq_b.scale", "layers.1.attn.wo_b.weight"
CONFIGS = {
    "fp4 experts": SMALL,
    "fp8 experts, mtp": replace(SMALL, expert_dtype="fp8", draft_ratios=(0,)),
    "dspark": replace(SMALL, draft_ratios=(0, 0), dspark=DSparkFields(3, 262, (0, 1, 2), 8, 2)),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """(official, converted) folder of each shape; never written to."""
    made = {}
    for name, config in CONFIGS.items():
        source, target = (tmp_path_factory.mktemp("convert") / part for part in ("in", "out"))
        synthesize(source, config, SEED, shard_bytes=200_000)
        convert_w8a8(source, target, shard_bytes=150_000)
        made[name] = (source, target)
    return made


@pytest.fixture
def converted(pairs, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(pairs["fp4 experts"][1], tmp_path / "converted"))


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


# what is written


@pytest.mark.parametrize("name", CONFIGS)
def test_both_folders_load_the_same_bits(pairs, name: str) -> None:
    source, target = pairs[name]
    assert len(list(target.glob("*.safetensors"))) > 2
    for sizes in [(1, 1, 1), (2, 1, 2), (2, 2, 2), (4, 2, 4), (4, 4, 4)]:
        topology = Topology(*sizes)
        for rank in {0, topology.world - 1}:
            config, wanted = load_weights(source, topology, rank, W8A8)
            found_config, found = load_weights(target, topology, rank, W8A8)
            assert found_config == config == CONFIGS[name]
            assert_equal_weights(found, wanted)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_rest_is_copied_as_it_is(pairs, name: str) -> None:
    """INT8 codes and FP32 scales for what the target multiplies in INT8; mtp.* and all else byte for byte."""
    before, after = (stored_tensors(folder) for folder in pairs[name])
    assert before.keys() == after.keys()
    int8 = re.compile(r"layers\.\d+\.(attn\.(indexer\.)?wq_b|attn\.wo_b|ffn\.(shared_)?experts\..*)\.(weight|scale)")
    for key, tensor in after.items():
        if int8.fullmatch(key):
            assert tensor.dtype == (torch.int8 if key.endswith("weight") else torch.float32), key
        else:
            same = tensor.view(torch.uint8), before[key].view(torch.uint8)
            assert tensor.dtype == before[key].dtype and torch.equal(*same), key
    source, target = pairs[name]
    assert (source / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    said = json.loads((target / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "w8a8" and said["weight_block_size"] == [128, 128]


def test_a_rank_reads_what_it_holds_and_no_more(pairs) -> None:
    """wo_b's channels need not be read whole once they are quantised."""
    source, target = pairs["fp8 experts, mtp"]
    topology = Topology(4, 4, 4)
    reads = [dict(load_weights(folder, topology, 1, W8A8)[1].log) for folder in (source, target)]
    assert reads[0][WO_B] == 4 * reads[1][WO_B] == 64 * 256
    assert sum(reads[1].values()) < sum(reads[0].values())
    assert not [name for name in reads[1] if name.startswith("mtp.")]


def test_scales_under_other_names_get_their_official_one(pairs, tmp_path) -> None:
    folder = Path(shutil.copytree(pairs["fp4 experts"][0], tmp_path / "in"))
    faults.rename("layers.1.attn.wq_a.scale", "layers.1.attn.wq_a.weight_scale_inv")(folder)
    convert_w8a8(folder, tmp_path / "out")
    assert "layers.1.attn.wq_a.scale" in stored_tensors(tmp_path / "out")
    wanted = load_weights(pairs["fp4 experts"][0], Topology(), 0, W8A8)[1]
    assert_equal_weights(load_weights(tmp_path / "out", Topology(), 0, W8A8)[1], wanted)


# what loads from it


@pytest.mark.parametrize("numerics", [FLOAT32, BFLOAT16])
def test_other_numerics_are_refused(pairs, numerics) -> None:
    message = f"stored quantised to w8a8, numerics is {numerics.name}, allowed: w8a8"
    with pytest.raises(ValueError, match=message):
        load_weights(pairs["fp4 experts"][1], Topology(), 0, numerics)


FAULTS = {
    "no scale": (faults.drop(SCALE), rf"weights without a scale \(1\): {CODES}"),
    "no codes": (faults.drop(CODES), rf"scales without a weight \(1\): {SCALE}"),
    "scales of blocks": (faults.put(SCALE, lambda t: t[:2].reshape(2, 1)), r"wrong shape .*\(2, 1\), allowed"),
    "too few codes": (faults.put(CODES, lambda t: t[:-1]), rf"of wrong shape \(1\): {CODES}"),
    "fp8 codes": (faults.put(CODES, lambda t: t.to(torch.float8_e4m3fn)), rf"{CODES} F8_E4M3, allowed I8"),
    "half scales": (faults.put(SCALE, lambda t: t.bfloat16()), rf"{SCALE} BF16, allowed F32"),
    "code -128": (faults.put(CODES, lambda t: t.index_fill(0, torch.tensor(3), -128)), "code -128, allowed: -127"),
    "NaN": (faults.put(SCALE, lambda t: t * float("nan")), rf"scale {SCALE} holds .* finite ones above 0"),
    "infinity": (faults.put(SCALE, lambda t: t * float("inf")), "scale .* finite ones above 0"),
    "zero": (faults.put(SCALE, lambda t: t * 0), "scale .* finite ones above 0"),
    "negative": (faults.put(SCALE, lambda t: -t), "scale .* finite ones above 0"),
    "official mark": (
        lambda folder: faults.edit_json(folder / "config.json", quantization_config={"quant_method": "fp8"}),
        r"quant_method is 'fp8', but layers\.0\.attn\.wq_b\.weight is stored as I8; allowed .* 'w8a8'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(converted, name: str) -> None:
    damage, message = FAULTS[name]
    damage(converted)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_weights(converted, Topology(), 0, W8A8)
    assert str(converted) in str(caught.value)


def test_a_mark_without_codes_is_refused(pairs, tmp_path) -> None:
    folder = Path(shutil.copytree(pairs["fp4 experts"][0], tmp_path / "in"))
    faults.edit_json(folder / "config.json", quantization_config={"quant_method": "w8a8"})
    with pytest.raises(CheckpointError, match=r"'w8a8', but .*wq_b\.weight is stored as F8_E4M3; allowed .* 'fp8'"):
        open_checkpoint(folder)


def load_both(groups: Groups, folders: list[str]) -> list[str | int]:
    results: list[str | int] = []
    for folder, numerics in zip(folders, (W8A8, FLOAT32, W8A8), strict=True):
        try:
            results.append(len(load_on_all_ranks(folder, groups, numerics)[1]))
        except CheckpointError as error:
            results.append(str(error))
    return results


@pytest.mark.timeout(120)
def test_all_ranks_say_the_same(ranks, pairs, converted) -> None:
    """A fault that one rank alone reads: an expert of the second."""
    faults.put("layers.2.ffn.experts.7.w2.scale", lambda t: -t)(converted)
    folders = [str(converted), str(converted), str(pairs["fp4 experts"][1])]
    first, second = ranks.run(Topology(2, 2, 2), "test_convert:load_both", timeout=60, folders=folders)
    assert first == second and "ranks [1]: " in first[0] and "experts.7.w2.scale" in first[0]
    assert "stored quantised to w8a8" in first[1] and isinstance(first[2], int)


# what is refused, and what is left


def test_nothing_is_overwritten(pairs, tmp_path) -> None:
    source, target = pairs["fp4 experts"]
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    for taken in (tmp_path / "file", tmp_path / "folder", tmp_path / "nowhere", source, target):
        with pytest.raises(ValueError, match="exists, allowed: a folder that does not exist yet, or an empty one"):
            convert_w8a8(source, taken)
    assert (tmp_path / "file").read_text() == "kept"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["kept"]
    (tmp_path / "empty").mkdir()
    convert_w8a8(source, tmp_path / "empty")
    assert open_checkpoint(tmp_path / "empty").form == "w8a8"


def test_bad_sources_write_nothing(pairs, tmp_path, monkeypatch) -> None:
    source, target = pairs["fp4 experts"]
    out = tmp_path / "deep" / "out"
    with pytest.raises(CheckpointError, match="is stored in the form w8a8, allowed: official"):
        convert_w8a8(target, out)
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert_w8a8(tmp_path / "absent", out)
    damaged = Path(shutil.copytree(source, tmp_path / "damaged"))
    faults.drop("norm.weight")(damaged)
    with pytest.raises(CheckpointError, match=r"missing \(1\): norm\.weight"):
        convert_w8a8(damaged, out)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(ValueError, match=r"out: takes [\d,]{7,} bytes, free on its disk are 1,000"):
        convert_w8a8(source, out)
    assert not out.parent.exists()


@pytest.mark.parametrize("made", [False, True])
def test_a_conversion_that_fails_leaves_nothing(pairs, tmp_path, monkeypatch, made: bool) -> None:
    """A weight that is NaN, found on the way, and a disk that fails."""
    folder = Path(shutil.copytree(pairs["fp4 experts"][0], tmp_path / "in"))
    out = tmp_path / "out"
    if made:
        out.mkdir()
    name = "layers.2.ffn.shared_experts.w2.weight"
    faults.edit_shard(folder, name, lambda tensors: tensors[name].view(torch.uint8)[5, :1].fill_(0x7F))
    with pytest.raises(CheckpointError, match=r"shared_experts\.w2\.weight holds NaN or infinity"):
        convert_w8a8(folder, out, shard_bytes=100_000)
    written = fail_second_shard(monkeypatch)
    with pytest.raises(OSError, match="disk full"):
        convert_w8a8(pairs["fp4 experts"][0], out, shard_bytes=100_000)
    assert len(written) == 2 and out.exists() == made and not (made and any(out.iterdir()))


# memory


def measure(source: str, target: str) -> None:
    _, rise = peak_rise(lambda: convert_w8a8(source, target, shard_bytes=8 * MIB))
    print(json.dumps({"rise": rise}))


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc/self/status, as on Linux")
def test_memory_is_that_of_a_shard(tmp_path) -> None:
    """A process of its own converts 45 MB in shards of 8; quantised they are 58 MB, in FP32 250."""
    synthesize(tmp_path / "in", wide_config(), 5, shard_bytes=16 * MIB)
    command = [sys.executable, __file__, str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rise = int(json.loads(done.stdout.splitlines()[-1])["rise"])
    assert 0 < rise < inventory(tmp_path / "out").num_bytes * 3 // 4, f"{rise / MIB:.0f} MiB"


# the verb


def test_the_verb(pairs, tmp_path, capsys) -> None:
    source = pairs["dspark"][0]
    out = tmp_path / "out"
    assert cli.main(["convert", "w8a8", str(source), str(out), "--json"]) == 0
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    assert data["schema"] == 1 and data["form"] == "w8a8" and data["directory"] == str(out)
    assert data["bytes"] == inventory(out).num_bytes and data["dtypes"]["I8"] > 100
    assert data["parts"]["draft"]["bytes"] == inventory(source).parts["draft"].num_bytes
    assert data["parts"]["routed experts"]["parameters"] == inventory(source).parts["routed experts"].parameters
    assert "form w8a8" in shown.err
    assert cli.main(["checkpoint", "inspect", str(out)]) == 0
    assert "form w8a8" in capsys.readouterr().out
    assert cli.main(["checkpoint", "inspect", str(source)]) == 0
    assert "form" not in capsys.readouterr().out.replace(str(source), "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "w8a8"),
        (["w8a8", "IN"], "OUT"),
        (["fp4", "IN", "OUT"], "invalid choice: 'fp4'"),
        (["w8a8", "IN", "IN"], "exists, allowed: a folder that does not exist yet"),
        (["w8a8", "/nowhere/x", "OUT"], "/nowhere/x/config.json: cannot be read"),
        (["w8a8", "IN", "/proc/x/out"], "/proc/x/out"),
        (["w8a8", "IN", "OUT", "--json", "/nowhere/x"], "--json is '/nowhere/x'"),
    ],
)
def test_wrong_flags(pairs, tmp_path, capsys, argv, message) -> None:
    places = {"IN": str(pairs["fp4 experts"][0]), "OUT": str(tmp_path / "out")}
    assert cli.main(["convert", *(places.get(word, word) for word in argv)]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


if __name__ == "__main__":
    measure(*sys.argv[1:])
