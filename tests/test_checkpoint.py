"""Loading equals slicing full weights; every planted fault is one clear error, on all ranks alike."""

import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import checkpoint_faults as faults
import pytest
import torch
from full_disk import fail_second_shard
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from meshspark.models.checkpoint import writer
from meshspark.models.checkpoint.inventory import inventory, preset_inventory
from meshspark.models.checkpoint.loader import load_on_all_ranks, load_weights
from meshspark.models.checkpoint.reader import CheckpointError, Reader, list_stored
from meshspark.models.checkpoint.share import shard_weights, share_bytes
from meshspark.models.checkpoint.synthetic import random_weights, synthesize
from meshspark.models.checkpoint.verify import open_checkpoint, read_config
from meshspark.models.checkpoint.writer import write_checkpoint
from meshspark.models.numerics import BFLOAT16, FLOAT32, FLOAT64, MODES
from meshspark.models.v4.config import DSparkFields, flash, tiny, tiny_thirds
from meshspark.models.v4.model import Model
from meshspark.models.v4.quant import encode
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

SEED = 11
SMALL_BLOCKS = replace(tiny(), weight_block_size=(48, 24))
DRAFTERS = {
    "mtp": replace(tiny(), draft_ratios=(0,)),
    "dspark": replace(tiny(), draft_ratios=(0, 0), dspark=DSparkFields(3, 262, (2, 3, 4), 8, 2)),
}


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A synthetic tiny checkpoint of several shards; never written to."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    assert synthesize(folder, tiny(), SEED, shard_bytes=300_000) == ()
    assert len(list(folder.glob("*.safetensors"))) == 4
    return folder


@pytest.fixture
def folder(base, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(base, tmp_path / "tiny"))


def assert_equal_weights(found, wanted):
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("float32", (1, 1, 1)), ("float64", (4, 2, 4)), ("bfloat16", (4, 4, 4)), ("float32", (4, 2, 2))],
)
def test_loading_equals_slicing_full_weights(base, name, sizes):
    topology, numerics = Topology(*sizes), MODES[name]
    full = random_weights(tiny(), SEED, numerics)
    for rank in range(topology.world):
        config, share = load_weights(base, topology, rank, numerics)
        assert config == tiny()
        assert_equal_weights(share, shard_weights(full, topology, rank, tiny()))
        assert sum(t.numel() * t.element_size() for t in share.values()) == share_bytes(
            config, topology, rank, numerics
        )
        assert not share.notes


def test_slices_that_cut_scale_blocks(tmp_path):
    """Output groups of 32 rows against blocks of 48 x 24."""
    full = random_weights(SMALL_BLOCKS, SEED, FLOAT32)
    write_checkpoint(tmp_path, SMALL_BLOCKS, full, tokenizer_json=None, shard_bytes=200_000)
    topology = Topology(8, 8, 8)
    for rank in range(8):
        _, share = load_weights(tmp_path, topology, rank, FLOAT32)
        assert_equal_weights(share, shard_weights(full, topology, rank, SMALL_BLOCKS))


def test_thirds(tmp_path):
    notes = synthesize(tmp_path, tiny_thirds(), SEED)
    assert "no tokenizer.json" in notes[0] and not (tmp_path / "tokenizer.json").exists()
    full = random_weights(tiny_thirds(), SEED, FLOAT64)
    _, share = load_weights(tmp_path, Topology(6, 3, 6), 4, FLOAT64)
    assert_equal_weights(share, shard_weights(full, Topology(6, 3, 6), 4, tiny_thirds()))
    assert share["head.weight"].shape == (32, 64) and share["layers.0.attn.wo_b.weight"].shape == (64, 64)


def test_a_topology_must_divide_the_model(base):
    with pytest.raises(ValueError, match="o_groups % tp"):
        load_weights(base, Topology(3, 3, 3), 0, FLOAT32)
    with pytest.raises(ValueError, match="o_groups % tp"):
        shard_weights(random_weights(tiny(), 0, FLOAT32), Topology(3, 3, 3), 0, tiny())
    _, share = load_weights(base, Topology(4, 2, 4), 1, FLOAT32)
    share.require(Topology(4, 2, 4), 1)
    with pytest.raises(ValueError, match=r"tp=2, ep=4.*tp=4, ep=4"):
        share.require(Topology(4, 4, 4), 1)
    with pytest.raises(ValueError, match=r"rank 1.*rank 2"):
        share.require(Topology(4, 2, 4), 2)


def test_a_model_refuses_the_share_of_another_topology(base):
    _, share = load_weights(base, Topology(4, 2, 4), 0, FLOAT32)
    with pytest.raises(ValueError, match=r"world=4, tp=2, ep=4.* but is used with .*world=1, tp=1, ep=1"):
        Model(tiny(), share, Groups.single(), FLOAT32)


def test_random_values_are_far_from_neutral_and_survive_storage():
    full = random_weights(tiny(), SEED, FLOAT32)
    for name in ("layers.0.attn_norm.weight", "layers.1.attn.attn_sink", "layers.1.ffn.gate.bias", "hc_head_base"):
        assert full[name].std() > 0.1, name
    other = random_weights(tiny(), SEED + 1, FLOAT32)
    assert all(not torch.equal(full[name], other[name]) for name in full)
    for name, tensor in full.items():
        if tensor.is_floating_point() and name.split(".")[-1] == "weight":
            assert torch.equal(tensor.bfloat16().float(), tensor), name


def test_log_names_what_was_read_and_nothing_foreign(base):
    _, share = load_weights(base, Topology(4, 2, 4), 3, FLOAT32)
    sizes = dict(share.log)
    experts = {int(n.split(".experts.")[1].split(".")[0]) for n in sizes if ".ffn.experts." in n}
    assert experts == {12, 13, 14, 15}
    assert sizes["layers.0.attn.wo_a.weight"] == 128 * 32 and sizes["layers.0.attn.wo_b.weight"] == 64 * 128
    assert sizes["head.weight"] == 132 * 64 * 2 and sizes["embed.weight"] == 264 * 64 * 2
    # The hash table is read once to be checked and once to be kept, everything else once.
    assert {name: n for name, n in Counter(name for name, _ in share.log).items() if n > 1} == {faults.GATE: 2}


def poison_experts(folder, experts):
    """NaN bytes in the scales of these experts."""
    for path in folder.glob("*.safetensors"):
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        for name, tensor in tensors.items():
            if any(f".ffn.experts.{e}." in name for e in experts) and name.endswith("scale"):
                tensor.view(torch.uint8).fill_(255)
        save_file(tensors, path)


def test_foreign_scales_are_never_touched(base, tmp_path):
    topology = Topology(4, 1, 4)
    full = random_weights(tiny(), SEED, FLOAT32)
    for rank in range(4):
        folder = Path(shutil.copytree(base, tmp_path / str(rank)))
        poison_experts(folder, set(range(16)) - set(range(4 * rank, 4 * rank + 4)))
        _, share = load_weights(folder, topology, rank, FLOAT32)
        assert_equal_weights(share, shard_weights(full, topology, rank, tiny()))
        with pytest.raises(CheckpointError, match=r"scale layers\.0\.ffn\.experts\.\d+\.w1\.scale holds NaN"):
            load_weights(folder, topology, (rank + 1) % 4, FLOAT32)


@pytest.mark.parametrize("form", ["uint8", "float32", "weight_scale_inv"])
def test_other_forms_of_scales(folder, form):
    def change(tensors):
        for name in [n for n in tensors if n.endswith(".scale")]:
            scale = tensors.pop(name)
            if form == "weight_scale_inv":
                tensors[name.replace(".scale", ".weight_scale_inv")] = scale
            else:
                tensors[name] = scale.view(torch.uint8) if form == "uint8" else scale.float()

    for name in ("embed.weight", "layers.1.attn_norm.weight", "layers.3.attn_norm.weight", "norm.weight"):
        faults.edit_shard(folder, name, change)
    for rank in range(2):
        _, share = load_weights(folder, Topology(2, 2, 2), rank, BFLOAT16)
        assert_equal_weights(
            share, shard_weights(random_weights(tiny(), SEED, BFLOAT16), Topology(2, 2, 2), rank, tiny())
        )


def test_base_release_with_fp8_experts_and_plain_scales(tmp_path):
    """Stored dtypes decide; scales that are no powers of two are rounded once, and it is said."""
    config = replace(tiny(), expert_dtype="fp8")
    write_checkpoint(tmp_path, config, random_weights(config, SEED, FLOAT32), tokenizer_json=None)
    faults.edit_json(tmp_path / "config.json", expert_dtype="fp4")
    found, share = load_weights(tmp_path, Topology(), 0, FLOAT32)
    assert found == config and "experts are stored as fp8" in share.notes[0]
    assert_equal_weights(share, random_weights(config, SEED, FLOAT32))
    odd = torch.tensor([[0.3]])
    faults.put(f"{faults.WQ_A}.scale", lambda old: odd)(tmp_path)
    codes = load_file(tmp_path / "model-00001-of-00001.safetensors")[f"{faults.WQ_A}.weight"]
    _, share = load_weights(tmp_path, Topology(), 0, BFLOAT16)
    assert "not exact in bfloat16, rounded: layers.1.attn.wq_a.weight" in share.notes[1]
    assert torch.equal(share[f"{faults.WQ_A}.weight"], (codes.double() * odd.double()).bfloat16())


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafters_are_verified_and_named_but_not_loaded(tmp_path, kind):
    config = DRAFTERS[kind]
    synthesize(tmp_path, config, SEED, shard_bytes=400_000)
    found, share = load_weights(tmp_path, Topology(), 0, FLOAT32)
    assert found == config and not [name for name in share if name.startswith("mtp.")]
    assert not [name for name, _ in share.log if name.startswith("mtp.")]
    assert inventory(tmp_path).parts["draft"] == preset_inventory(config).parts["draft"]
    name = "mtp.0.enorm.weight" if kind == "mtp" else "mtp.1.markov_head.markov_w1.weight"
    faults.drop(name)(tmp_path)
    with pytest.raises(CheckpointError, match=f"missing .*{name}"):
        load_weights(tmp_path, Topology(), 0, FLOAT32)


def test_written_checkpoint_is_read_back_bit_for_bit(tmp_path):
    config = DRAFTERS["dspark"]
    full = random_weights(config, SEED, FLOAT32, draft=True)
    write_checkpoint(tmp_path, config, full, tokenizer_json=None, shard_bytes=150_000)
    checkpoint = open_checkpoint(tmp_path)
    with Reader(tmp_path) as reader:
        for name in ("mtp.0.main_proj", "mtp.1.ffn.experts.7.w2"):
            held = full[name + ".weight"] if ".experts." not in name else full["mtp.1.ffn.experts.w2.weight"][7]
            spec = writer.tensor_table(config)
            quant = next(s.quant for s in spec if s.name == name + ".weight")
            codes, scale = encode(held, quant)
            assert torch.equal(
                reader.read(checkpoint.stored[name + ".weight"]).view(torch.uint8), codes.view(torch.uint8)
            )
            assert torch.equal(
                reader.read(checkpoint.stored[name + ".scale"]).view(torch.uint8), scale.view(torch.uint8)
            )
    shards = {stored.shard for name, stored in checkpoint.stored.items() if name.startswith("mtp.")}
    assert not shards & {stored.shard for name, stored in checkpoint.stored.items() if not name.startswith("mtp.")}


def test_writer_refuses_incomplete_weights_before_writing(tmp_path):
    full = dict(random_weights(tiny(), SEED, FLOAT32))
    full["extra"] = full.pop("norm.weight")
    full["head.weight"] = full["head.weight"][:-1]
    with pytest.raises(ValueError, match=r"missing \['norm.weight'\].*\['extra'\].*head.weight"):
        write_checkpoint(tmp_path / "out", tiny(), full)
    assert not (tmp_path / "out").exists()


def test_a_broken_write_is_no_checkpoint_and_a_new_one_leaves_nothing_stale(folder, monkeypatch):
    fail_second_shard(monkeypatch)
    full = random_weights(tiny(), SEED + 1, FLOAT32)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(folder, tiny(), full, shard_bytes=300_000)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_weights(folder, Topology(), 0, FLOAT32)
    monkeypatch.undo()
    write_checkpoint(folder, tiny(), full, shard_bytes=1 << 30)
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    assert_equal_weights(load_weights(folder, Topology(), 0, FLOAT32)[1], full)


def test_inventory_of_a_folder_is_that_of_its_config(base):
    found, wanted = inventory(base), preset_inventory(tiny())
    assert (found.tensors, found.num_bytes, found.dtypes, found.parts) == (
        wanted.tensors, wanted.num_bytes, wanted.dtypes, wanted.parts,
    )  # fmt: skip
    assert found.shards == 4
    data = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    assert 0 < data - found.num_bytes < 120_000, "the rest is headers"


def test_stray_files_are_ignored_with_a_note(folder):
    save_file({"head.weight": torch.zeros(1)}, folder / "old.safetensors")
    _, share = load_weights(folder, Topology(), 0, FLOAT32)
    assert share.notes == ("ignored, not in the index: old.safetensors",)
    assert_equal_weights(share, random_weights(tiny(), SEED, FLOAT32))


def test_one_file_needs_no_index_and_links_inside_are_fine(tmp_path):
    synthesize(tmp_path, tiny(), SEED)
    (tmp_path / faults.INDEX).unlink()
    assert open_checkpoint(tmp_path).config == tiny()
    synthesize(tmp_path, tiny(), SEED)
    (tmp_path / "blob").mkdir()
    shard = tmp_path / "model-00001-of-00001.safetensors"
    shard.rename(tmp_path / "blob" / "x")
    shard.symlink_to(tmp_path / "blob" / "x")
    assert open_checkpoint(tmp_path).config == tiny()


def test_a_config_may_name_a_drafter_that_is_not_there_yet(folder):
    """dspark_* keys without ratios beyond the layers: no stage, nothing missing."""
    faults.dspark()(folder)
    config, share = load_weights(folder, Topology(), 0, FLOAT32)
    assert config.dspark == DSparkFields(3, 262, (2, 3, 4), 8, 0)
    assert_equal_weights(share, random_weights(tiny(), SEED, FLOAT32))


def test_names_out_of_a_file_are_shown_harmless_and_short(folder):
    name = "\x1b[2J" + "x" * 5000
    faults.edit_shard(folder, "norm.weight", lambda tensors: tensors.update({name: torch.zeros(1)}))
    with pytest.raises(CheckpointError, match="unexpected") as caught:
        load_weights(folder, Topology(), 0, FLOAT32)
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 1000


def test_folders_that_hold_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_config(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no such folder"):
        list_stored(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="holds no safetensors"):
        list_stored(tmp_path)


def test_byte_level_tokenizer_covers_every_byte(base):
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    text = "h\u00e9llo \n\t\x00 \U0001f600 <think>x</think>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(tokenizer.get_vocab().values()) < tiny().vocab_size
    assert tokenizer.token_to_id("<\uff5cbegin\u2581of\u2581sentence\uff5c>") == tiny().bos_token_id
    assert tokenizer.token_to_id("<\uff5cend\u2581of\u2581sentence\uff5c>") == tiny().eos_token_id
    assert len(tokenizer.encode("".join(map(chr, range(256)))).ids) == 128 + 2 * 128
    assert tokenizer.token_to_id("<\uff5cUser\uff5c>") is not None


def test_tokenizer_says_what_had_no_room(tmp_path):
    notes = synthesize(tmp_path / "a", replace(tiny(), vocab_size=260), SEED)
    assert "no room" in notes[0] and "<think>" in notes[0]
    synthesize(tmp_path / "b", DRAFTERS["dspark"], SEED)
    tokenizer = Tokenizer.from_file(str(tmp_path / "b" / "tokenizer.json"))
    assert tokenizer.id_to_token(262) == "<\uff5cdspark\u2581noise\uff5c>"
    assert tokenizer.decode(tokenizer.encode("ab").ids) == "ab"


@pytest.mark.parametrize("name", faults.FAULTS)
def test_fault(folder, name):
    pattern = faults.plant(name, folder)
    with pytest.raises(CheckpointError, match=re.compile(pattern, re.DOTALL)) as caught:
        load_weights(folder, Topology(), 0, FLOAT32)
    assert str(folder) in str(caught.value) or "config.json" in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_large_index_and_config_are_refused_unread(folder):
    (folder / "config.json").write_text(" " * (2 << 20))
    with pytest.raises(CheckpointError, match=r"2097152 bytes, allowed: at most 1048576"):
        load_weights(folder, Topology(), 0, FLOAT32)


def load_each(groups, folders):
    """Per folder (or per-rank list of folders): the error text, or the sum of the shapes loaded."""
    results = []
    for folder in folders:
        own = folder if isinstance(folder, str) else folder[groups.rank]
        try:
            _, share = load_on_all_ranks(own, groups, FLOAT32)
        except CheckpointError as error:
            results.append(str(error))
        else:
            results.append(len(share))
    return results


@pytest.mark.timeout(120)
def test_every_fault_is_the_same_error_on_all_ranks(ranks, base, tmp_path):
    folders, patterns = [], []
    for number, name in enumerate(faults.FAULTS):
        folder = Path(shutil.copytree(base, tmp_path / str(number)))
        patterns.append(faults.plant(name, folder))
        folders.append(str(folder))
    results = ranks.run(Topology(2, 2, 2), "test_checkpoint:load_each", timeout=100, folders=[*folders, str(base)])
    assert results[0] == results[1]
    for text, pattern in zip(results[0], patterns, strict=False):
        assert isinstance(text, str) and re.search(pattern, text, re.DOTALL)
    assert results[0][-1] == len(random_weights(tiny(), SEED, FLOAT32))


@pytest.mark.timeout(120)
def test_a_fault_that_one_rank_sees_fails_on_all(ranks, base, tmp_path):
    poisoned = Path(shutil.copytree(base, tmp_path / "poisoned"))
    poison_experts(poisoned, {9})
    gone = Path(shutil.copytree(base, tmp_path / "gone"))
    faults.plant("shard absent", gone)
    other = tmp_path / "other"
    synthesize(other, replace(tiny(), rms_norm_eps=1e-5), SEED)
    good = str(base)
    folders = [str(poisoned), [good, good, good, str(gone)], [good, str(other), good, good], good]
    results = ranks.run(Topology(4, 2, 4), "test_checkpoint:load_each", timeout=100, folders=folders)
    assert results[0] == results[1] == results[2] == results[3]
    assert re.search(r"ranks \[2\]: .*experts\.9\.w1\.scale holds NaN", results[0][0])
    assert re.search(r"ranks \[3\]: .*absent", results[0][1])
    assert "ranks [1] read another checkpoint than rank 0" in results[0][2]
    assert isinstance(results[0][3], int), "the ranks are still in step"


def test_one_rank_alone_takes_the_same_way(base, folder):
    config, share = load_on_all_ranks(base, Groups.single(), FLOAT32)
    assert_equal_weights(share, random_weights(config, SEED, FLOAT32))
    faults.plant("missing", folder)
    with pytest.raises(CheckpointError, match="missing") as caught:
        load_on_all_ranks(folder, Groups.single(), FLOAT32)
    assert "ranks" not in str(caught.value)


def test_flash_config_needs_no_checkpoint_to_be_refused(base):
    with pytest.raises(CheckpointError, match=r"missing \(\d+\): .* and \d+ more"):
        load_weights(base, Topology(), 0, FLOAT32, config=flash())
