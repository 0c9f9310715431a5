"""convert dspark as a verb: output and refusals, a hub's repository, ranks that read their own experts alone."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import checkpoint_faults as faults
import pytest
import torch
from official_drafters import (
    INDEX,
    VARIANT_NAMES,
    random_official,
    same_bytes,
    stored_tensors,
    table_of,
    write_official,
)

from meshspark.launch import cli
from meshspark.launch.convert_dspark import parse_size
from meshspark.models.checkpoint.reader import CheckpointError
from meshspark.models.checkpoint.synthetic import synthesize
from meshspark.models.conversion.exporting import export_dspark
from meshspark.models.conversion.hub import is_repository
from meshspark.models.conversion.importing import import_dspark
from meshspark.models.conversion.loading import load_dspark
from meshspark.models.conversion.variants import VARIANTS
from meshspark.models.v4.config import tiny_dspark

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """Variant -> "in" official, "ours", "sliced" in two, "plain" exported unquantised; never written to."""
    found = {}
    for variant in VARIANT_NAMES:
        root = tmp_path_factory.mktemp(variant)
        at = {name: root / name for name in ("in", "ours", "sliced", "plain")}
        write_official(at["in"], variant)
        import_dspark(at["in"], at["ours"], VARIANTS[variant])
        import_dspark(at["in"], at["sliced"], VARIANTS[variant], ep_slices=2)
        export_dspark(at["ours"], at["plain"], VARIANTS[variant])
        found[variant] = at
    return found


# the verb


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_there_and_back(made, tmp_path: Path, capsys, variant: str) -> None:
    flags = ["--variant", variant, "--keep-scales"]
    ours, out = str(tmp_path / "ours"), str(tmp_path / "out")
    size = ["--max-shard-size", "500KB", "--ep-slices", "2", "--json"]
    assert cli.main(["convert", "dspark", "import", *flags, str(made[variant]["in"]), ours, *size]) == 0
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    stored = stored_tensors(Path(ours))
    assert data["schema"] == 1 and data["variant"] == variant and data["directory"] == ours
    assert data["tensors"] == len(stored) == {"v4": 84, "v41": 81}[variant]
    assert data["num_bytes"] == sum(tensor.nbytes for tensor in stored.values())
    assert data["parameters"] == sum(tensor.numel() for tensor in stored.values())
    assert data["shards"] == len(list(Path(ours).glob("model-*.safetensors"))) > 2
    assert f"shard 1 of {data['shards']}" in shown.err
    assert ("bias_vl" in shown.err) == (variant == "v41") == bool(data["notes"])
    assert cli.main(["convert", "dspark", "export", *flags, ours, out, "--format", "official"]) == 0
    assert f"{len(random_official(variant))} tensors" in capsys.readouterr().out
    wanted, found = random_official(variant), stored_tensors(Path(out))
    assert found.keys() == wanted.keys() and all(same_bytes(found[name], each) for name, each in wanted.items())


def test_a_synthetic_checkpoint_goes_through(tmp_path: Path) -> None:
    """Of the library's own writer, target and all: its bytes come back, for its scales are those that we choose."""
    synthesize(tmp_path / "in", tiny_dspark(), 4)
    places = [str(tmp_path / name) for name in ("in", "ours", "out")]
    assert cli.main(["convert", "dspark", "import", "--variant", "v4", *places[:2]]) == 0
    assert cli.main(["convert", "dspark", "export", "--variant", "v4", "--format", "official", *places[1:]]) == 0
    before = {name: each for name, each in stored_tensors(tmp_path / "in").items() if name.startswith("mtp.")}
    after = stored_tensors(tmp_path / "out")
    assert after.keys() == before.keys() and all(same_bytes(after[name], each) for name, each in before.items())


IMPORT, EXPORT = ["dspark", "import", "--variant", "v4"], ["dspark", "export", "--variant", "v4"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["dspark"], "import|export"),
        (["dspark", "import", "IN", "OUT"], "--variant"),
        (["dspark", "import", "--variant", "v5", "IN", "OUT"], "invalid choice: 'v5'"),
        ([*IMPORT, "IN"], "OUT"),
        ([*IMPORT, "/nowhere/x", "OUT"], "/nowhere/x/config.json: cannot be read"),
        ([*IMPORT, "IN", "IN"], "is what is read"),
        ([*IMPORT, "IN", "FULL"], "is not empty, allowed"),
        ([*IMPORT, "IN", "/proc/x/out"], "/proc/x/out"),
        ([*IMPORT, "V41", "OUT"], "is a V4.1 drafter by its tensors"),
        ([*IMPORT, "IN", "OUT", "--ep-slices", "3"], "--ep-slices is 3"),
        ([*IMPORT, "IN", "OUT", "--dtype", "float16"], "invalid choice: 'float16'"),
        ([*IMPORT, "IN", "OUT", "--max-shard-size", "5 apples"], "--max-shard-size is '5 apples', allowed: such as"),
        ([*IMPORT, "IN", "OUT", "--revision", "main"], "--revision is 'main', but IN is a path"),
        ([*IMPORT, "IN", "OUT", "--json", "/nowhere/x"], "--json is '/nowhere/x'"),
        ([*EXPORT, "OURS", "OUT", "--revision", "main"], "unrecognized arguments: --revision"),
        ([*EXPORT, "OURS", "OUT", "--format", "fp8"], "invalid choice: 'fp8'"),
        ([*EXPORT, "OURS", "OUT", "--keep-scales"], "--keep-scales goes with --format official"),
        ([*EXPORT, "IN", "OUT"], "has no official_config.json"),
        ([*EXPORT, "OURS", "OUT", "--official-config", "/nowhere/c.json"], "/nowhere/c.json: cannot be read"),
    ],
)  # fmt: skip
def test_wrong_flags(made, tmp_path: Path, capsys, argv: list[str], message: str) -> None:
    places = {"IN": made["v4"]["in"], "OURS": made["v4"]["ours"], "FULL": made["v4"]["plain"], "V41": made["v41"]["in"]}
    words = {name: str(path) for name, path in places.items()} | {"OUT": str(tmp_path / "out")}
    assert cli.main(["convert", *(words.get(word, word) for word in argv)]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_sizes() -> None:
    wanted = {"5GB": 5 * 10**9, "512MiB": 512 << 20, "7": 7, "1 kb": 1000, "2TiB": 2 << 40, "3B": 3}
    assert {text: parse_size(text) for text in wanted} == wanted
    for text in ("0", "", "GB", "-1", "1.5GB", "1PB", "9" * 30, "5GBB"):
        with pytest.raises(ValueError, match="--max-shard-size is"):
            parse_size(text)


# a hub's repository


class FakeHub:
    """A hub with one repository, its cache laid out as huggingface_hub's: snapshots of links to blobs."""

    def __init__(self, source: Path, cache: Path) -> None:
        self.source, self.cache, self.asked = source, cache / "models--some--drafter", []

    def hf_hub_download(self, repo_id: str, filename: str, *, revision: str | None = None) -> str:
        self.asked.append((repo_id, filename, revision))
        if not (self.source / filename).exists() or revision == "gone":
            raise OSError(f"404: no {filename} at {revision}")
        blob, link = self.cache / "blobs" / filename, self.cache / "snapshots" / COMMIT / filename
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes((self.source / filename).read_bytes())
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..", "..", "blobs", filename))
        return str(link)


@pytest.fixture
def hub(made, tmp_path: Path, monkeypatch) -> FakeHub:
    fake = FakeHub(write_official(tmp_path / "hub", "v41"), tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=fake.hf_hub_download))
    return fake


def test_only_what_is_needed_is_downloaded(made, hub: FakeHub, tmp_path: Path) -> None:
    """Config, index and three shards, all of the commit that the revision was when the first came."""
    argv = ["convert", "dspark", "import", "--variant", "v41", "some/drafter", str(tmp_path / "out")]
    assert cli.main([*argv, "--revision", "v2"]) == 0
    shards = [f"model-0000{part}-of-00009.safetensors" for part in (7, 8, 9)]
    assert [name for _, name, _ in hub.asked] == [INDEX, "config.json", *shards]
    assert {repo for repo, _, _ in hub.asked} == {"some/drafter"}
    assert [revision for _, _, revision in hub.asked] == ["v2", *[COMMIT] * 4]
    wanted = stored_tensors(made["v41"]["ours"])
    assert all(same_bytes(each, wanted[name]) for name, each in stored_tensors(tmp_path / "out").items())
    hub.asked.clear()
    assert cli.main([*argv, "--overwrite"]) == 0
    assert [revision for _, _, revision in hub.asked] == [None, *[COMMIT] * 4]


def test_what_a_hub_can_do_wrong(hub: FakeHub, tmp_path: Path, capsys) -> None:
    argv = ["convert", "dspark", "import", "--variant", "v41", "some/drafter", str(tmp_path / "out")]

    def fails(*flags: str) -> str:
        assert cli.main([*argv, *flags]) == 2 and not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert f"some/drafter: {INDEX} cannot be downloaded: 404" in fails("--revision", "gone")
    (hub.source / "model-00008-of-00009.safetensors").rename(tmp_path / "kept")
    assert "model-00008-of-00009.safetensors cannot be downloaded: 404" in fails()
    faults.edit_index(hub.source, lambda weight_map: weight_map.update({"mtp.0.attn_norm.weight": "../../x"}))
    hub.asked.clear()
    assert "the index names '../../x', allowed: plain file names" in fails()
    assert "../../x" not in [name for _, name, _ in hub.asked]
    faults.edit_index(
        hub.source, lambda weight_map: [weight_map.pop(name) for name in list(weight_map) if "mtp" in name]
    )
    assert f"its {INDEX} names no tensor mtp.*" in fails()


def test_without_the_extra_it_is_said(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert cli.main(["convert", "dspark", "import", "--variant", "v4", "some/drafter", "out"]) == 2
    err = capsys.readouterr().err
    assert "some/drafter is no folder here" in err and "pip install 'meshspark[hub]'" in err


def test_what_is_a_repository(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "folder").mkdir(parents=True)
    for text in ("deepseek-ai/DeepSeek-V4-Flash", "a/b", "a_1/b.c"):
        assert is_repository(text)
    for text in ("a/folder", "./a/b", "../b", "/a/b", "a", "a/b/c", "a/", "~/b", "a/b\n", "a/..", "https://x/y"):
        assert not is_repository(text)


# a rank's share


@pytest.mark.parametrize("variant", VARIANT_NAMES)
@pytest.mark.parametrize("which", ["in", "ours", "sliced", "plain"])
def test_every_rank_reads_its_own_experts_and_no_others(made, variant: str, which: str) -> None:
    whole = stored_tensors(made[variant]["ours"])
    for ep in (1, 2, 4):
        for ep_rank in range(ep):
            loaded = load_dspark(made[variant][which], ep=ep, ep_rank=ep_rank)
            assert loaded.tensors.keys() == whole.keys()
            mine = slice(ep_rank * 4 // ep, (ep_rank + 1) * 4 // ep)
            for name, each in whole.items():
                wanted = each[mine].clone() if ".mlp.experts." in name else each
                assert same_bytes(loaded.tensors[name], wanted), name
            read = dict(loaded.log)
            if which in ("in", "plain"):
                experts = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".ffn.experts." in name}
                assert experts == set(range(4)[mine])
            total = sum(size for name, size in loaded.log if ".experts." in name)
            assert which == "in" or total == sum(t.nbytes for n, t in loaded.tensors.items() if ".mlp.experts." in n)
            assert loaded.config["dflash_config"]["attention_mode"] == VARIANTS[variant].attention_mode


def test_foreign_experts_may_be_broken(tmp_path: Path) -> None:
    tensors = random_official("v4")
    for name, tensor in tensors.items():
        if name.endswith("scale") and any(f".experts.{expert}." in name for expert in (0, 1, 3)):
            tensor.view(torch.uint8).fill_(255)
    folder = write_official(tmp_path / "in", "v4", tensors)
    assert load_dspark(folder, ep=4, ep_rank=2).tensors["layers.0.mlp.experts.down_proj"].shape == (1, 160, 96)
    with pytest.raises(CheckpointError, match=r"experts\.3\.w1\.scale holds NaN"):
        load_dspark(folder, ep=4, ep_rank=3)


def test_loading_in_float32_and_what_it_refuses(made, tmp_path: Path) -> None:
    loaded = load_dspark(made["v4"]["in"], dtype=torch.float32)
    whole = stored_tensors(made["v4"]["ours"])
    assert all(torch.equal(loaded.tensors[name], each.float()) for name, each in whole.items())
    for ep, ep_rank in ((3, 0), (2, 2), (0, 0), (2, -1)):
        with pytest.raises(ValueError, match=f"ep is {ep} and ep_rank {ep_rank}, allowed: a divisor of the 4 experts"):
            load_dspark(made["v4"]["in"], ep=ep, ep_rank=ep_rank)
    with pytest.raises(ValueError, match=r"dtype is torch\.float16"):
        load_dspark(made["v4"]["in"], dtype=torch.float16)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text('{"weight_map": {"x": "y"}}')
    with pytest.raises(CheckpointError, match=r"attention_mode is None, allowed: deepseek_v4 or deepseek_v41"):
        load_dspark(tmp_path)
    assert len(table_of("v4")) == 108
