"""The drafter's weights out of a checkpoint: every rank's share, its bytes, what of mtp.* is refused, drafts of it."""

import json
import shutil
from pathlib import Path

import checkpoint_faults as faults
import pytest
import torch
from draft_scene import Pages as ScenePages
from draft_scene import draft_model, drafts_of, feed

from meshspark.launch import cli
from meshspark.layouts.bits import same_bits
from meshspark.models.checkpoint.convert import convert_w8a8
from meshspark.models.checkpoint.draft_kind import KINDS
from meshspark.models.checkpoint.loader import load_on_all_ranks, load_weights
from meshspark.models.checkpoint.names import held_table
from meshspark.models.checkpoint.reader import CheckpointError
from meshspark.models.checkpoint.share import shard_weights, share_bytes
from meshspark.models.checkpoint.synthetic import random_weights, synthesize
from meshspark.models.dspark.drafter import make_drafter
from meshspark.models.matrix import held_matrix
from meshspark.models.numerics import BFLOAT16, FLOAT32, W8A8, numerics
from meshspark.models.v4.config import from_config_json, tiny, tiny_dspark, tiny_mtp
from meshspark.models.v4.sizing import held_weights
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

SEED = 5
CONFIGS = {"dspark": tiny_dspark(), "mtp": tiny_mtp()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A synthetic checkpoint of each kind, and one without mtp.*; never written to."""
    made = {kind: tmp_path_factory.mktemp("draft") / kind for kind in (*CONFIGS, "none")}
    for kind, folder in made.items():
        synthesize(folder, CONFIGS.get(kind, tiny()), SEED, shard_bytes=400_000)
    return made


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path):
    def copied(kind: str) -> Path:
        return Path(shutil.copytree(folders[kind], tmp_path / "folder"))

    return copied


@pytest.mark.parametrize("mode", ["float64", "float32", "bfloat16", "w8a8"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_rank_gets_its_share_of_the_drafter(folders: dict[str, Path], kind: str, mode: str) -> None:
    config, topology = CONFIGS[kind], Topology(4, 2, 4)
    full = random_weights(config, SEED, numerics(mode), draft=True)
    for rank in range(topology.world):
        found, share = load_weights(folders[kind], topology, rank, numerics(mode), draft=True)
        wanted = shard_weights(full, topology, rank, config, draft=True)
        assert found == config and list(share) == list(wanted)
        assert set(held_table(config, draft=True)) <= set(share)
        assert all(share[name].dtype == each.dtype and same_bits(share[name], each) for name, each in wanted.items())
        held = sum(tensor.nbytes for tensor in share.values())
        assert held == share_bytes(config, topology, rank, numerics(mode), draft=True)
        planned = held_weights(config, topology, numerics(mode), rank=rank, draft=True)
        assert held == sum(each.num_bytes for each in planned.values())
        assert share["mtp.0.ffn.experts.w1.weight"].shape == (4, 32, 64)
        assert share["mtp.0.attn.wo_a.weight"].shape == (4 * 32, 32)


def test_what_of_the_drafter_runs_in_int8(folders: dict[str, Path]) -> None:
    _, share = load_weights(folders["dspark"], Topology(), 0, W8A8, draft=True)
    codes = {name.split(".", 2)[2] for name, each in share.items() if each.dtype == torch.int8 and "mtp." in name}
    experts = {f"ffn.{kind}.{name}.weight" for kind in ("experts", "shared_experts") for name in ("w1", "w2", "w3")}
    assert codes == {"attn.wq_b.weight", "attn.wo_b.weight", *experts}
    assert share["mtp.0.attn.wq_b.scale"].shape == (8 * 32,)
    for name, dtype in {
        "mtp.0.main_proj.weight": torch.bfloat16,
        "mtp.2.markov_head.markov_w1.weight": torch.bfloat16,
        "mtp.2.markov_head.markov_w2.weight": torch.bfloat16,
        "mtp.2.confidence_head.proj.weight": torch.float32,
        "mtp.2.hc_head_fn": torch.float32,
    }.items():
        assert share[name].dtype == dtype, name


@pytest.mark.parametrize("mode", ["float64", "float32", "bfloat16", "w8a8"])
def test_a_loaded_drafter_drafts_as_one_in_memory(folders: dict[str, Path], mode: str) -> None:
    groups = Groups.single()
    config, share = load_on_all_ranks(folders["dspark"], groups, numerics(mode), draft=True)
    head = held_matrix(share, "head", numerics(mode))
    loaded = make_drafter(config, share, share["embed.weight"], head, groups, numerics(mode))
    weights = random_weights(config, SEED, numerics(mode), draft=True)
    drafts = []
    for drafter in (loaded, draft_model(groups, mode, config, weights)):
        pages = ScenePages(drafter, 2, 24, 4, seed=1)
        with torch.no_grad():
            feed(drafter, pages, 3, 1, 0, 21)
        drafts.append(drafts_of(drafter, pages, [(3, 1, 21)]))
    assert same_bits(drafts[0].ids, drafts[1].ids) and same_bits(drafts[0].confidence, drafts[1].confidence)
    assert drafts[0].logits is not None and same_bits(drafts[0].logits, drafts[1].logits)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_converted_checkpoint_gives_the_same_drafter(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """convert leaves mtp.* as it is; it is quantised here and there by the same rule."""
    convert_w8a8(folders[kind], tmp_path / "out")
    both = (folders[kind], tmp_path / "out")
    wanted, found = (load_weights(folder, Topology(2, 2, 2), 1, W8A8, draft=True)[1] for folder in both)
    assert list(found) == list(wanted)
    assert all(same_bits(found[name], each) for name, each in wanted.items())


def test_without_draft_mtp_is_left_where_it_is(folders: dict[str, Path]) -> None:
    for kind in CONFIGS:
        _, share = load_weights(folders[kind], Topology(2, 2, 2), 1, BFLOAT16)
        assert not [name for name in (*share, *dict(share.log)) if name.startswith("mtp.")]
        full = random_weights(CONFIGS[kind], SEED, BFLOAT16, draft=True)
        assert list(shard_weights(full, Topology(2, 2, 2), 1, CONFIGS[kind])) == list(share)


def test_a_drafter_that_is_not_there_cannot_be_asked_for(folders: dict[str, Path]) -> None:
    for ask in (
        lambda: load_weights(folders["none"], Topology(), 0, FLOAT32, draft=True),
        lambda: load_on_all_ranks(folders["none"], Groups.single(), FLOAT32, draft=True),
        lambda: shard_weights(random_weights(tiny(), SEED, FLOAT32), Topology(), 0, tiny(), draft=True),
    ):
        with pytest.raises(ValueError, match=r"draft is True, but the model has no mtp\.\* tensors; allowed: False"):
            ask()


MARKS = {
    "dspark": ["mtp.0.main_proj.weight", "mtp.0.main_norm.weight", "mtp.2.markov_head.markov_w1.weight",
               "mtp.2.markov_head.markov_w2.weight", "mtp.2.confidence_head.proj.weight", "mtp.2.norm.weight",
               "mtp.2.hc_head_fn", "mtp.1.attn.wq_a.weight"],
    "mtp": ["mtp.0.e_proj.weight", "mtp.0.h_proj.weight", "mtp.0.enorm.weight", "mtp.0.hnorm.weight",
            "mtp.0.hc_head_base", "mtp.0.ffn.gate.bias"],
}  # fmt: skip


def drop(folder: Path, names: list[str]) -> None:
    for name in names:
        scale = name.removesuffix("weight") + "scale"
        index = json.loads((folder / faults.INDEX).read_text())["weight_map"]
        for each in (name, scale):
            if each in index:
                faults.drop(each)(folder)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in MARKS.items() for name in names])
def test_half_of_either_is_refused_naming_what_is_missing(copy, kind: str, name: str) -> None:
    folder = copy(kind)
    drop(folder, [name])
    for draft in (False, True):
        with pytest.raises(CheckpointError, match=rf"missing \(1\): {name}"):
            load_weights(folder, Topology(), 0, FLOAT32, draft=draft)


def test_the_tensors_tell_the_kind(copy) -> None:
    """Whatever config.json says; and where no tensor tells it, what its config calls for is missing."""
    folder = copy("dspark")
    raw = json.loads((folder / "config.json").read_text())
    plain = {key: value for key, value in raw.items() if not key.startswith("dspark_")}
    (folder / "config.json").write_text(json.dumps(plain))
    with pytest.raises(CheckpointError, match=r"a DSpark drafter by its tensors \(mtp\..*lacks the dspark_\* keys"):
        load_weights(folder, Topology(), 0, FLOAT32)
    shutil.rmtree(folder)
    folder = copy("mtp")
    dspark = {key: value for key, value in raw.items() if key.startswith("dspark_")}
    plain = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(plain | dspark))
    with pytest.raises(CheckpointError, match=r"a plain MTP layer by its tensors \(mtp\..*has dspark_\* keys"):
        load_weights(folder, Topology(), 0, FLOAT32)
    drop(folder, MARKS["mtp"][:4])
    with pytest.raises(CheckpointError, match=r"missing \(5\): mtp\.0\.main_proj\.weight"):
        load_weights(folder, Topology(), 0, FLOAT32)


def test_a_mixture_of_both_is_refused(copy) -> None:
    folder = copy("dspark")
    faults.edit_shard(
        folder, "mtp.0.main_norm.weight", lambda tensors: tensors.update({"mtp.0.enorm.weight": torch.ones(64)})
    )
    with pytest.raises(CheckpointError, match=r"neither a DSpark drafter nor .*mtp\.0\.main_.*also mtp\.0\.enorm"):
        load_weights(folder, Topology(), 0, FLOAT32)


def test_marks_are_those_of_the_name_table() -> None:
    """Each mark names a tensor of its own kind, and none of the other."""
    for kind, other in (("dspark", "mtp"), ("mtp", "dspark")):
        names = [name for name in held_table(CONFIGS[kind], draft=True) if name.startswith("mtp.")]
        assert all(any(mark in name for name in names) for mark in KINDS[kind])
        assert not [name for name in names for mark in KINDS[other] if mark in name]
        assert CONFIGS[kind].drafter == kind and from_config_json(CONFIGS[kind].to_json()) == CONFIGS[kind]
    assert tiny().drafter == "none"


@pytest.mark.parametrize("kind", CONFIGS)
def test_synthesize_by_name(tmp_path: Path, kind: str) -> None:
    assert cli.main(["checkpoint", "synthesize", str(tmp_path / "out"), "--preset", f"tiny-{kind}"]) == 0
    config, share = load_weights(tmp_path / "out", Topology(), 0, FLOAT32, draft=True)
    assert config == CONFIGS[kind]
    wanted = random_weights(config, 0, FLOAT32, draft=True)
    assert all(same_bits(share[name], each) for name, each in wanted.items())
