"""convert dspark: only mtp.* opened, paths inside, faults of both sides, nothing left of what fails."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import checkpoint_faults as faults
import pytest
import torch
from official_drafters import (
    INDEX,
    VARIANT_NAMES,
    official_json,
    random_official,
    same_bytes,
    stored_tensors,
    table_of,
    write_official,
)
from safetensors.torch import load_file, save_file

from meshspark.models.checkpoint import reader as checkpoint_reader
from meshspark.models.checkpoint.reader import CheckpointError
from meshspark.models.conversion.exporting import export_dspark
from meshspark.models.conversion.importing import import_dspark
from meshspark.models.conversion.variants import VARIANTS

V4, V41 = VARIANTS["v4"], VARIANTS["v41"]
WQ_A, W1 = "mtp.1.attn.wq_a", "mtp.2.ffn.experts.3.w1"
Q_A = "layers.1.self_attn.q_a_proj.weight"
SMALL_SHARD = 60_000
NAN = float("nan")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """Variant -> "in" an official folder, "ours" its import with scales kept in small shards; never written to."""
    found = {}
    for variant in VARIANT_NAMES:
        root = tmp_path_factory.mktemp(variant)
        found[variant] = {"in": write_official(root / "in", variant), "ours": root / "ours"}
        import_dspark(root / "in", root / "ours", VARIANTS[variant], keep_scales=True, shard_bytes=SMALL_SHARD)
    return found


@pytest.fixture
def copy(made, tmp_path: Path):
    def copied(variant: str, which: str) -> Path:
        return Path(shutil.copytree(made[variant][which], tmp_path / f"copy of {which}"))

    return copied


# what is opened


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_only_shards_of_mtp_are_opened(made, variant: str, tmp_path: Path, monkeypatch) -> None:
    """A shard that is there but holds none of it is left alone, broken as it may be; the others may hold more."""
    folder = Path(shutil.copytree(made[variant]["in"], tmp_path / "in"))
    (folder / "model-00001-of-00009.safetensors").write_bytes(b"no safetensors at all")
    name = "mtp.0.attn_norm.weight"
    faults.edit_shard(folder, name, lambda tensors: tensors.update({"layers.9.attn_norm.weight": torch.ones(3)}))
    opened = []
    read = checkpoint_reader.read_header
    monkeypatch.setattr(checkpoint_reader, "read_header", lambda path: opened.append(path.name) or read(path))
    import_dspark(folder, tmp_path / "out", VARIANTS[variant])
    assert sorted(opened) == [f"model-0000{part}-of-00009.safetensors" for part in (7, 8, 9)]
    assert stored_tensors(tmp_path / "out").keys() == stored_tensors(made[variant]["ours"]).keys()


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a\\b", ""])
def test_paths_stay_inside_the_folder(made, copy, tmp_path: Path, shard: str) -> None:
    save_file({f"{WQ_A}.weight": random_official("v4")[f"{WQ_A}.weight"]}, tmp_path / "outside.safetensors")
    folder = copy("v4", "in")
    faults.edit_index(folder, lambda weight_map: weight_map.update({f"{WQ_A}.weight": shard}))
    with pytest.raises(CheckpointError, match=r"the index names .* allowed: plain file names in it"):
        import_dspark(folder, tmp_path / "out", V4)
    assert not (tmp_path / "out").exists()


def test_links_stay_inside_the_folder(copy, tmp_path: Path) -> None:
    """But for a folder around it that the caller trusts."""
    folder = copy("v4", "in")
    shard = folder / "model-00009-of-00009.safetensors"
    (tmp_path / "blobs").mkdir()
    shard.rename(tmp_path / "blobs" / "x")
    shard.symlink_to(tmp_path / "blobs" / "x")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        import_dspark(folder, tmp_path / "out", V4)
    import_dspark(folder, tmp_path / "out", V4, root=tmp_path)
    assert len(stored_tensors(tmp_path / "out")) == 78
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        import_dspark(folder, tmp_path / "out2", V4, root=folder)


# faults of an official folder

FAULTS = {
    "missing": (faults.drop("mtp.2.norm.weight"), r"missing \(1\): mtp\.2\.norm\.weight"),
    "a whole stage": (
        lambda folder: [faults.drop(name)(folder) for name in random_official("v4") if name.startswith("mtp.1.attn")],
        r"missing \(9\): mtp\.1\.attn_norm\.weight, mtp\.1\.attn\.attn_sink, .* and 4 more",
    ),
    "extra": (
        lambda folder: faults.edit_shard(
            folder, f"{WQ_A}.weight", lambda tensors: tensors.update({"mtp.3.attn_norm.weight": torch.ones(160)})
        ),
        r"unexpected \(1\): mtp\.3\.attn_norm\.weight",
    ),
    "no scale": (faults.drop(f"{WQ_A}.scale"), rf"weights without a scale \(1\): {WQ_A}\.weight"),
    "orphan scale": (faults.drop(f"{W1}.weight"), rf"scales without a weight \(1\): {W1}\.scale"),
    "two scales": (
        lambda folder: faults.edit_shard(
            folder, f"{WQ_A}.scale", lambda tensors: tensors.update({f"{WQ_A}.weight_scale_inv": torch.ones(1, 2)})
        ),
        r"weights with two scales \(1\)",
    ),
    "scale of a plain weight": (
        lambda folder: faults.edit_shard(
            folder, "mtp.0.attn_norm.weight", lambda tensors: tensors.update({"mtp.0.attn_norm.scale": torch.ones(1)})
        ),
        r"unexpected \(1\): mtp\.0\.attn_norm\.scale",
    ),
    "shape": (faults.put("mtp.0.attn.attn_sink", lambda t: t[:-1]), r"of wrong shape \(1\): mtp\.0\.attn\.attn_sink"),
    "scales of other blocks": (
        faults.put(f"{WQ_A}.scale", lambda t: t.view(torch.uint8).repeat(3, 1).view(torch.float8_e8m0fnu)),
        rf"of wrong shape \(1\): {WQ_A}\.scale \(3, 2\), allowed \(1, 2\)",
    ),
    "unpacked codes": (
        faults.put(f"{W1}.weight", lambda t: t.repeat(1, 2)),
        rf"of wrong shape \(1\): {W1}\.weight \(96, 160\), allowed \(96, 80\)",
    ),
    "dtype": (faults.put(f"{WQ_A}.weight", lambda t: t.to(torch.float16)), rf"{WQ_A}\.weight F16, allowed F8_E4M3"),
    "fp32 scale": (faults.put(f"{WQ_A}.scale", lambda t: t.float()), rf"{WQ_A}\.scale F32, allowed F8_E8M0 or U8"),
    "narrow sinks": (
        faults.put("mtp.0.attn.attn_sink", lambda t: t.bfloat16()), r"mtp\.0\.attn\.attn_sink BF16, allowed F32",
    ),
    "half plain": (
        faults.put("mtp.0.attn.wq_a.weight", lambda t: t.bfloat16()),
        r"has a quantization_config, but mtp\.0\.attn\.wq_a\.weight is stored as BF16",
    ),
    "an index that lies": (
        lambda folder: faults.edit_index(folder, lambda weight_map: weight_map.update({"mtp.9.x": next(
            shard for name, shard in weight_map.items() if name.startswith("mtp."))})),
        r"entries whose tensor is not in its shard: mtp\.9\.x",
    ),
    "an index that hides": (
        lambda folder: faults.edit_index(folder, lambda weight_map: weight_map.pop(f"{WQ_A}.scale")),
        rf"lacks tensors that its shards hold: {WQ_A}\.scale",
    ),
    "shard gone": (lambda folder: (folder / "model-00008-of-00009.safetensors").unlink(), "00008.* is absent"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config\.json: cannot be read"),
    "no index": (lambda folder: (folder / INDEX).unlink(), r"3 shards .* but no model\.safetensors\.index\.json"),
    "odd config": (lambda folder: (folder / "config.json").write_text("[1"), r"config\.json: not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault(copy, tmp_path: Path, name: str) -> None:
    """Before a byte is written."""
    damage, message = FAULTS[name]
    folder = copy("v4", "in")
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        import_dspark(folder, tmp_path / "out", V4)
    assert str(folder) in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("variant", "other"), [VARIANT_NAMES, VARIANT_NAMES[::-1]])
def test_the_wrong_variant_is_refused(made, tmp_path: Path, variant: str, other: str) -> None:
    with pytest.raises(CheckpointError, match=f"but the variant is {other}; allowed: {variant}"):
        import_dspark(made[variant]["in"], tmp_path / "out", VARIANTS[other])
    config = tmp_path / "config.json"
    config.write_text(json.dumps(official_json(other)))
    with pytest.raises(CheckpointError, match=r"does not fit the official config: .*pre_from_prev is"):
        export_dspark(made[variant]["ours"], tmp_path / "out", VARIANTS[other], official_config=config)
    assert not (tmp_path / "out").exists()


# faults of a draft's folder

STACK = "layers.0.mlp.experts.down_proj"
OUR_FAULTS = {
    "missing": (faults.drop(Q_A), rf"missing \(1\): {Q_A}"),
    "missing stack": (faults.drop(STACK), rf"missing \(1\): {STACK}"),
    "extra": (
        lambda folder: faults.edit_shard(folder, Q_A, lambda ours: ours.update({"lm_head.weight": torch.ones(2)})),
        r"unexpected \(1\): lm_head\.weight",
    ),
    "shape": (faults.put(STACK, lambda t: t[:-1]), rf"of wrong shape \(1\): {STACK} \(3, 160, 96\), allowed \(4, "),
    "dtype": (faults.put(Q_A, lambda t: t.double()), rf"of wrong dtype \(1\): {Q_A} F64, allowed BF16 or F32"),
    "one slice of two": (faults.rename(STACK, f"{STACK}.1of2"), rf"missing \(1\): {STACK}\.0of2"),
    "slices that do not divide": (faults.rename(STACK, f"{STACK}.1of3"), rf"unexpected \(1\): {STACK}\.1of3"),
    "whole and sliced": (
        lambda folder: faults.edit_shard(
            folder, STACK, lambda tensors: tensors.update({f"{STACK}.0of1": tensors[STACK].clone()})
        ),
        rf"unexpected \(1\): {STACK}\.0of1",
    ),
    "a slice of what is none": (faults.rename(Q_A, f"{Q_A}.0of1"), rf"missing \(1\): {Q_A}; unexpected \(1\)"),
    "another width": (
        lambda folder: faults.edit_json(folder / "config.json", hidden_size=128),
        "does not fit the official config: hidden_size is 128, allowed: 160",
    ),
    "another window": (
        lambda folder: faults.edit_json(folder / "config.json", dflash_config={"context_window": 5}),
        r"does not fit the official config: dflash_config\.target_layer_ids is None",
    ),
    "NaN": (faults.put(STACK, lambda t: t.index_fill(0, torch.tensor(2), NAN)), f"{STACK} holds NaN or infinity"),
    "infinity": (faults.put(Q_A, lambda t: t * float("inf")), f"{Q_A} holds NaN or infinity"),
}  # fmt: skip


@pytest.mark.parametrize("name", OUR_FAULTS)
def test_fault_of_a_draft(copy, tmp_path: Path, name: str) -> None:
    damage, message = OUR_FAULTS[name]
    folder = copy("v4", "ours")
    damage(folder)
    for form in ("bf16", "official"):
        with pytest.raises(CheckpointError, match=message) as caught:
            export_dspark(folder, tmp_path / "out", V4, form=form, shard_bytes=SMALL_SHARD)
        assert str(folder) in str(caught.value) and not (tmp_path / "out").exists()


def edit_kept(folder: Path, change) -> None:
    path = folder / "official_scales.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kept: kept.pop(f"{W1}.scale"), rf"missing \(1\): {W1}\.scale"),
        (lambda kept: kept.update({"x.scale": torch.ones(1)}), r"unexpected \(1\): x\.scale"),
        (lambda kept: kept.update({f"{WQ_A}.scale": kept[f"{WQ_A}.scale"][:, :1].clone()}), r"of wrong shape \(1\)"),
        (lambda kept: kept.update({f"{WQ_A}.scale": kept[f"{WQ_A}.scale"].float()}), r"of wrong dtype \(1\)"),
        (lambda kept: kept.update({"mtp.0.ffn.gate.bias_vl": torch.ones(4).bfloat16()}), r"of wrong dtype \(1\)"),
        (lambda kept: kept[f"{WQ_A}.scale"].view(torch.uint8).fill_(255), rf"kept scale {WQ_A}\.scale holds NaN"),
        (lambda kept: kept[f"{W1}.scale"].view(torch.uint8).add_(3), rf"{W1}\.weight has values that its kept"),
    ],
)  # fmt: skip
def test_faults_of_what_was_kept(copy, tmp_path: Path, change, message: str) -> None:
    folder = copy("v41", "ours")
    edit_kept(folder, change)
    with pytest.raises(CheckpointError, match=message):
        export_dspark(folder, tmp_path / "out", V41, form="official", keep_scales=True)
    assert not (tmp_path / "out").exists()
    export_dspark(folder, tmp_path / "out", V41, form="official")


def test_kept_dtypes_that_do_not_fit(copy, tmp_path: Path) -> None:
    folder = copy("v4", "ours")
    path = folder / "official_dtypes.json"
    for text, message in (
        ('{"mtp.0.attn_norm.weight": "F64"}', r"mtp\.0\.attn_norm\.weight is 'F64', allowed: BF16, F32"),
        ('{"mtp.0.attn_norm.weight": [1]}', r"mtp\.0\.attn_norm\.weight is \[1\], allowed"),
        ('{"mtp.7.x": "F32"}', r"none of the drafter's: mtp\.7\.x"),
        ("[]", "a JSON list"),
    ):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            export_dspark(folder, tmp_path / "out", V4, form="official", keep_scales=True)


# what is asked wrongly


def test_what_does_not_go_together(made, copy, tmp_path: Path) -> None:
    ours, out = made["v4"]["ours"], tmp_path / "out"
    export_dspark(ours, tmp_path / "plain", V4)
    bare = copy("v4", "ours")
    (bare / "official_scales.safetensors").unlink()
    (bare / "official_config.json").unlink()
    config = made["v4"]["in"] / "config.json"
    for ask, message in (
        (lambda: import_dspark(made["v4"]["in"], out, V4, ep_slices=3), "--ep-slices is 3, allowed: a divisor of .* 4"),
        (lambda: import_dspark(made["v4"]["in"], out, V4, ep_slices=0), "--ep-slices is 0"),
        (lambda: import_dspark(made["v4"]["in"], out, V4, dtype="float16"), "dtype is 'float16'"),
        (lambda: import_dspark(tmp_path / "plain", out, V4, keep_scales=True), "is not quantised and has no scales"),
        (lambda: export_dspark(ours, out, V4, form="fp8"), "format is 'fp8', allowed: bf16, official"),
        (lambda: export_dspark(ours, out, V4, keep_scales=True), "--keep-scales goes with --format official"),
        (lambda: export_dspark(bare, out, V4), "has no official_config.json.* --official-config FILE"),
        (
            lambda: export_dspark(bare, out, V4, form="official", keep_scales=True, official_config=config),
            "has no official_scales.safetensors",
        ),
        (
            lambda: export_dspark(ours, out, V4, form="official", official_config=tmp_path / "plain" / "config.json"),
            "has no quantization_config that --format official could follow",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            ask()
        assert not out.exists()
    export_dspark(bare, out, V4, official_config=config)
    assert stored_tensors(out).keys() == stored_tensors(tmp_path / "plain").keys()


def test_what_may_be_overwritten(made, copy, tmp_path: Path) -> None:
    source = made["v4"]["in"]
    out = copy("v41", "ours")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty, allowed: .* or --overwrite"):
        import_dspark(source, out, V4)
    assert len(stored_tensors(out)) == 75
    import_dspark(source, out, V4, overwrite=True)
    names = {path.name for path in out.iterdir()}
    shards = {"model-00001-of-00001.safetensors", INDEX}
    assert names == {*shards, "config.json", "official_config.json", "notes.txt"}
    assert all(same_bytes(each, stored_tensors(out)[name]) for name, each in stored_tensors(made["v4"]["ours"]).items())
    export_dspark(made["v41"]["ours"], out, V41, overwrite=True)
    assert len(stored_tensors(out)) == len(table_of("v41"))
    target = copy("v4", "in")
    for folder, message in (
        (target, r"holds another model \(embed\.weight, norm\.weight\)|holds another model \(embed\.weight"),
        (source, "is what is read"),
        (tmp_path / "file", "exists and is no folder"),
        (tmp_path / "single", r"holds a config\.json without model\.safetensors\.index\.json"),
        (tmp_path / "odd", "cannot be overwritten: .*weight_map is absent"),
    ):
        (tmp_path / "file").touch()
        for name in ("single", "odd"):
            (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / "single" / "config.json").touch()
        (tmp_path / "odd" / INDEX).write_text("{}")
        before = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        with pytest.raises(ValueError, match=message):
            import_dspark(source, folder, V4, overwrite=True)
        assert before == (sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [])
    (tmp_path / "empty").mkdir()
    import_dspark(source, tmp_path / "empty", V4)


@pytest.mark.parametrize("before", ["nothing", "an empty folder", "a draft"])
@pytest.mark.parametrize("way", ["import", "export"])
def test_what_fails_leaves_nothing_that_looks_whole(
    made, copy, tmp_path: Path, monkeypatch, before: str, way: str
) -> None:
    """At every step: each shard, the kept scales, the index, the configs."""
    out, overwrite = tmp_path / "out", before == "a draft"
    written: list[Path] = []

    def work() -> None:
        if way == "import":
            import_dspark(made["v4"]["in"], out, V4, keep_scales=True, overwrite=overwrite, shard_bytes=700_000)
        else:
            export_dspark(made["v4"]["ours"], out, V4, overwrite=overwrite, shard_bytes=700_000)

    def prepare() -> None:
        shutil.rmtree(out, ignore_errors=True)
        if before == "an empty folder":
            out.mkdir()
        elif before == "a draft":
            shutil.copytree(made["v41"]["ours"], out)
            (out / "mine.txt").touch()

    def failing(at: int):
        def rename(path: Path, other):
            written.append(path)
            if len(written) > at:
                raise OSError("disk full")
            return plain_rename(path, other)

        return rename

    plain_rename = Path.rename
    for at in range(20):
        prepare()
        written.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", failing(at))
            patch.setattr(Path, "replace", failing(at))
            try:
                work()
            except OSError as error:
                assert str(error) == "disk full"
            else:
                break
        if before == "nothing":
            assert not out.exists()
        else:
            assert [path.name for path in out.iterdir()] == (["mine.txt"] if before == "a draft" else [])
    assert at == len(written) > 5 and (out / "config.json").exists() and not list(out.glob("*.partial"))


def test_a_full_disk_is_an_error_before_the_first_byte(made, tmp_path: Path, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(ValueError, match=r"out: takes [\d,]{7,} bytes, free on its disk are 1,000"):
        import_dspark(made["v4"]["in"], tmp_path / "out", V4)
    with pytest.raises(ValueError, match=r"out: takes [\d,]{7,} bytes, free on its disk are 1,000"):
        export_dspark(made["v4"]["ours"], tmp_path / "out", V4)
    assert not (tmp_path / "out").exists()
