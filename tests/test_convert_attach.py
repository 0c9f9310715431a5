"""convert dspark attach: a target and a draft become one checkpoint that drafts; what does not fit is refused."""

import json
import shutil
from pathlib import Path

import pytest
from official_drafters import same_bytes, stored_tensors, write_official
from safetensors.torch import save_file

from meshspark.launch import cli
from meshspark.models.checkpoint.convert import convert_w8a8
from meshspark.models.checkpoint.reader import INDEX_NAME, CheckpointError
from meshspark.models.checkpoint.synthetic import synthesize
from meshspark.models.checkpoint.verify import open_checkpoint
from meshspark.models.conversion.attaching import attach_dspark
from meshspark.models.conversion.importing import import_dspark
from meshspark.models.conversion.variants import MTP, VARIANTS
from meshspark.models.dspark.calibration import FILE_NAME
from meshspark.models.v4.config import tiny, tiny_dspark, tiny_mtp


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, a whole drafting checkpoint of other weights, and the draft out of that; never written to."""
    root = tmp_path_factory.mktemp("attach")
    at = {name: root / name for name in ("target", "whole", "draft", "mtp", "w8a8", "v41")}
    synthesize(at["target"], tiny(), 3)
    synthesize(at["whole"], tiny_dspark(), 4)
    synthesize(at["mtp"], tiny_mtp(), 4)
    import_dspark(at["whole"], at["draft"], VARIANTS["v4"])
    convert_w8a8(at["target"], at["w8a8"])
    write_official(root / "official", "v41")
    import_dspark(root / "official", at["v41"], VARIANTS["v41"])
    return at


def test_the_target_as_it_was_and_the_draft_as_it_was(made, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    places = ["--checkpoint", str(made["target"]), str(made["draft"]), str(out)]
    assert cli.main(["convert", "dspark", "attach", *places, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    target, whole, found = (stored_tensors(each) for each in (made["target"], made["whole"], out))
    drafter = {name: each for name, each in whole.items() if name.startswith("mtp.")}
    assert told["tensors"] == len(drafter) and told["notes"] == []
    assert found.keys() == target.keys() | drafter.keys()
    assert all(same_bytes(found[name], each) for name, each in (target | drafter).items())
    config = open_checkpoint(out).config
    assert config.drafter == "dspark" and config == open_checkpoint(made["whole"]).config
    assert (out / "tokenizer.json").read_bytes() == (made["target"] / "tokenizer.json").read_bytes()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing else is left"


def test_it_drafts_and_writes_what_the_target_writes(made, tmp_path: Path) -> None:
    attach_dspark(made["target"], made["draft"], tmp_path / "out", shard_bytes=200_000)
    assert len(list((tmp_path / "out").glob("drafter-*.safetensors"))) > 1
    ids = []
    for folder, more in ((made["target"], []), (tmp_path / "out", ["--speculative", "dspark"])):
        target = tmp_path / "ids.json"
        argv = ["generate", "--checkpoint", str(folder), "--prompt", "def f(x):", "--max-new-tokens", "9", *more]
        assert cli.main([*argv, "--json", str(target)]) == 0
        ids.append(json.loads(target.read_text())["requests"][0]["output_ids"])
    assert ids[0] == ids[1]


def _join(folder: Path, names: set[str]) -> None:
    """Put what these shards hold into the first of them."""
    index = json.loads((folder / INDEX_NAME).read_text())
    first = min(names)
    joined = {name: each for name, each in stored_tensors(folder).items() if index["weight_map"][name] in names}
    for name in names:
        (folder / name).unlink()
    save_file(joined, folder / first)
    index["weight_map"] |= dict.fromkeys(joined, first)
    (folder / INDEX_NAME).write_text(json.dumps(index))


@pytest.mark.parametrize("mixed", [False, True])
def test_an_earlier_drafter_is_left_out(made, tmp_path: Path, mixed: bool) -> None:
    """Whether it lies in shards of its own or among the target's; its keys and its calibration go with it."""
    target, out = tmp_path / "target", tmp_path / "out"
    synthesize(target, tiny_mtp(), 4, shard_bytes=300_000)
    if mixed:
        _join(target, {f"model-0000{number}-of-00005.safetensors" for number in (1, 5)})
    (target / FILE_NAME).write_text("{}")
    (target / "LICENSE").write_text("free")
    attach_dspark(target, made["draft"], out, replace=True)
    before, whole, found = (stored_tensors(each) for each in (target, made["whole"], out))
    wanted = {name: each for name, each in before.items() if not name.startswith("mtp.")}
    wanted |= {name: each for name, each in whole.items() if name.startswith("mtp.")}
    assert found.keys() == wanted.keys() and all(same_bytes(found[name], each) for name, each in wanted.items())
    assert open_checkpoint(out).config == open_checkpoint(made["whole"]).config
    assert (out / "LICENSE").exists() and not (out / FILE_NAME).exists()
    index = json.loads((out / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    shards = {path.name for path in out.glob("model-*.safetensors")}
    linked = {name for name in shards if (out / name).samefile(target / name)}
    assert len(shards) == 4 and len(linked) == 4 - mixed


def test_an_mtp_layer_in_the_place_of_a_dspark_drafter(made, tmp_path: Path) -> None:
    import_dspark(made["mtp"], tmp_path / "layer", MTP)
    places = ["--checkpoint", str(made["whole"]), "--replace", str(tmp_path / "layer"), str(tmp_path / "out")]
    assert cli.main(["convert", "mtp", "attach", *places]) == 0
    config = open_checkpoint(tmp_path / "out").config
    assert config.drafter == "mtp" and config == open_checkpoint(made["mtp"]).config


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [
        ("whole", "draft", r"has a drafter \(dspark\), allowed: a target without one, or --replace"),
        ("mtp", "draft", r"has a drafter \(mtp\)"),
        ("w8a8", "draft", "is stored as w8a8, allowed: official"),
        ("target", "v41", "is a draft of kind v41, allowed: v4"),
        ("target", "target", "dflash_config.attention_mode is"),
    ],
)
def test_what_does_not_go_together(made, tmp_path: Path, target: str, draft: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attach_dspark(made[target], made[draft], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_another_target_and_a_place_that_is_taken(made, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(made["draft"], tmp_path / "draft"))
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "num_target_layers": 43}))
    with pytest.raises(ValueError, match="num_target_layers is 43, allowed: "):
        attach_dspark(made["target"], draft, tmp_path / "out")
    (draft / "config.json").write_text(json.dumps({**config, "hidden_size": 96}))
    with pytest.raises(CheckpointError):
        attach_dspark(made["target"], draft, tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="out exists, allowed: a folder that does not exist yet"):
        attach_dspark(made["target"], made["draft"], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "out"] and not list(
        (tmp_path / "out").iterdir()
    )
