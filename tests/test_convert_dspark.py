"""convert dspark: every value and every byte both ways, ends of the formats, the files that are written."""

import json
import shutil
from functools import lru_cache
from pathlib import Path

import checkpoint_faults as faults
import pytest
import torch
from official_drafters import (
    VARIANT_NAMES,
    naive_value,
    random_official,
    same_bytes,
    stored_tensors,
    table_of,
    write_official,
)

from meshspark.models.checkpoint import reader as checkpoint_reader
from meshspark.models.checkpoint import stream
from meshspark.models.checkpoint.reader import CheckpointError, list_stored
from meshspark.models.conversion import folder as folder_module
from meshspark.models.conversion.exporting import export_dspark
from meshspark.models.conversion.importing import import_dspark
from meshspark.models.conversion.names import draft_tensors
from meshspark.models.conversion.ours import sliced_names
from meshspark.models.conversion.variants import VARIANTS

V4, V41 = VARIANTS["v4"], VARIANTS["v41"]
WQ_A, W1 = "mtp.1.attn.wq_a", "mtp.2.ffn.experts.3.w1"
Q_A = "layers.1.self_attn.q_a_proj.weight"
SMALL_SHARD = 60_000
STACK = "layers.0.mlp.experts.down_proj"


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


@lru_cache
def expected(variant: str) -> dict[str, torch.Tensor]:
    """Ours in FP64, made value by value from the stored tensors, under names that are spelled out here."""
    stored = random_official(variant)
    block = {"v4": (128, 128), "v41": (32, 32)}[variant]
    found: dict[str, torch.Tensor] = {}

    def value(name: str) -> torch.Tensor:
        if f"{name}.scale" not in stored:
            return stored[name if name in stored else f"{name}.weight"].double()
        codes, scale = stored[f"{name}.weight"], stored[f"{name}.scale"]
        return naive_value(codes, scale, block if codes.dtype == torch.float8_e4m3fn else (1, 32))

    attention = {"wq_a": "q_a_proj", "wq_b": "q_b_proj", "wkv": "kv_proj", "wo_a": "o_a_proj", "wo_b": "o_b_proj"}
    attention |= {"q_norm": "q_a_norm", "kv_norm": "kv_norm"}
    for stage in range(3):
        old, new = f"mtp.{stage}", f"layers.{stage}"
        for name, ours in attention.items():
            found[f"{new}.self_attn.{ours}.weight"] = value(f"{old}.attn.{name}")
        found[f"{new}.self_attn.sinks"] = value(f"{old}.attn.attn_sink")
        found[f"{new}.input_layernorm.weight"] = value(f"{old}.attn_norm")
        found[f"{new}.post_attention_layernorm.weight"] = value(f"{old}.ffn_norm")
        found[f"{new}.mlp.gate.weight"] = value(f"{old}.ffn.gate")
        found[f"{new}.mlp.gate.expert_bias"] = value(f"{old}.ffn.gate.bias")
        for name, ours in {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.items():
            found[f"{new}.mlp.shared_experts.{ours}.weight"] = value(f"{old}.ffn.shared_experts.{name}")
        each = [{w: value(f"{old}.ffn.experts.{e}.{w}") for w in ("w1", "w2", "w3")} for e in range(4)]
        found[f"{new}.mlp.experts.gate_up_proj"] = torch.stack([torch.cat((e["w1"], e["w3"])) for e in each])
        found[f"{new}.mlp.experts.down_proj"] = torch.stack([e["w2"] for e in each])
        for site in ("attn", "ffn"):
            for name, ours in {"fn": "weight", "base": "bias", "scale": "scale"}.items():
                found[f"{new}.{site}_residual.mix_{ours}"] = value(f"{old}.hc_{site}_{name}")
    found |= {"fc.weight": value("mtp.0.main_proj"), "hidden_norm.weight": value("mtp.0.main_norm")}
    found |= {"norm.weight": value("mtp.2.norm"), "confidence_head.proj.weight": value("mtp.2.confidence_head.proj")}
    markov = {"v4": ("markov_w1", "markov_w2"), "v41": ("embed", "head")}[variant]
    for index, name in enumerate(markov, start=1):
        found[f"markov_head.markov_w{index}.weight"] = value(f"mtp.2.markov_head.{name}")
    if variant == "v4":
        for name, ours in {"fn": "weight", "base": "bias", "scale": "scale"}.items():
            found[f"residual_readout.mix_{ours}"] = value(f"mtp.2.hc_head_{name}")
    return found


# what is written


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_import_gives_every_value_exactly(made, variant: str) -> None:
    wanted, found = expected(variant), stored_tensors(made[variant]["ours"])
    assert found.keys() == wanted.keys() and len(found) == {"v4": 78, "v41": 75}[variant]
    wide = {tensor.name for tensor in draft_tensors(table_of(variant)) if tensor.is_wide}
    for name, value in wanted.items():
        assert found[name].dtype == (torch.float32 if name in wide else torch.bfloat16), name
        assert found[name].shape == value.shape and torch.equal(found[name].double(), value), name
    assert len(list(made[variant]["ours"].glob("model-*.safetensors"))) > 5


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_round_trip_by_byte(made, variant: str, tmp_path: Path) -> None:
    """Of scales that an encoder would choose otherwise, and of a bias_vl other than the bias."""
    done = export_dspark(made[variant]["ours"], tmp_path / "out", VARIANTS[variant], form="official", keep_scales=True)
    wanted, found = random_official(variant), stored_tensors(tmp_path / "out")
    assert found.keys() == wanted.keys() and done.tensors == len(found) and not done.notes
    assert [name for name in wanted if not same_bytes(found[name], wanted[name])] == []
    assert (tmp_path / "out" / "config.json").read_bytes() == (made[variant]["in"] / "config.json").read_bytes()


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_round_trip_by_value(made, variant: str, tmp_path: Path) -> None:
    """Quantised again with scales of our own: other bytes, the same values."""
    done = export_dspark(made[variant]["ours"], tmp_path / "out", VARIANTS[variant], form="official")
    assert not done.notes
    found, before = stored_tensors(tmp_path / "out"), random_official(variant)
    assert not same_bytes(found[f"{W1}.scale"], before[f"{W1}.scale"])
    import_dspark(tmp_path / "out", tmp_path / "again", VARIANTS[variant])
    wanted, again = stored_tensors(made[variant]["ours"]), stored_tensors(tmp_path / "again")
    assert again.keys() == wanted.keys() and all(same_bytes(again[name], each) for name, each in wanted.items())


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_unquantised_round_trip(made, variant: str, tmp_path: Path) -> None:
    done = export_dspark(made[variant]["ours"], tmp_path / "out", VARIANTS[variant])
    found = stored_tensors(tmp_path / "out")
    assert found.keys() == {spec.name for spec in table_of(variant)} and not done.notes
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16, torch.float32}
    values = expected(variant)
    assert torch.equal(found[f"{W1}.weight"].double(), values["layers.2.mlp.experts.gate_up_proj"][3, :96])
    assert torch.equal(found["mtp.0.attn.attn_sink"].double(), values["layers.0.self_attn.sinks"])
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in said and "expert_dtype" not in said
    assert said["architectures"] == ["DeepseekV4ForCausalLMDSpark"]
    import_dspark(tmp_path / "out", tmp_path / "again", VARIANTS[variant], shard_bytes=SMALL_SHARD)
    wanted, again = stored_tensors(made[variant]["ours"]), stored_tensors(tmp_path / "again")
    assert again.keys() == wanted.keys() and all(same_bytes(again[name], each) for name, each in wanted.items())
    configs = [json.loads((at / "config.json").read_text()) for at in (made[variant]["ours"], tmp_path / "again")]
    assert configs[0] == configs[1]


def test_bias_vl_is_dropped_and_written_back_as_a_copy(made, tmp_path: Path) -> None:
    done = import_dspark(made["v41"]["in"], tmp_path / "ours", V41)
    assert "other than gate.bias: mtp.0.ffn.gate.bias_vl" in done.notes[0] and "written" not in done.notes[0]
    assert not [name for name in stored_tensors(tmp_path / "ours") if name.endswith("_vl")]
    for form in ("bf16", "official"):
        export_dspark(tmp_path / "ours", tmp_path / form, V41, form=form)
        found, before = stored_tensors(tmp_path / form), random_official("v41")
        for stage in range(3):
            bias, image = (f"mtp.{stage}.ffn.gate.{name}" for name in ("bias", "bias_vl"))
            assert same_bytes(found[image], before[bias]) and not same_bytes(found[image], before[image])
    equal = {name: before[name.removesuffix("_vl")] if name.endswith("_vl") else each for name, each in before.items()}
    assert not import_dspark(write_official(tmp_path / "equal", "v41", equal), tmp_path / "ours2", V41).notes


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_stacks_in_slices(made, variant: str, tmp_path: Path) -> None:
    """The same values in more tensors, and the same bytes back."""
    import_dspark(made[variant]["in"], tmp_path / "ours", VARIANTS[variant], keep_scales=True, ep_slices=4)
    found, whole = stored_tensors(tmp_path / "ours"), stored_tensors(made[variant]["ours"])
    assert len(found) == len(whole) + 3 * 2 * 3
    stack = "layers.1.mlp.experts.down_proj"
    assert torch.equal(torch.cat([found[f"{stack}.{i}of4"] for i in range(4)]), whole[stack])
    export_dspark(tmp_path / "ours", tmp_path / "out", VARIANTS[variant], form="official", keep_scales=True)
    wanted, back = random_official(variant), stored_tensors(tmp_path / "out")
    assert back.keys() == wanted.keys() and all(same_bytes(back[name], each) for name, each in wanted.items())


def test_other_dtypes_that_hold_the_same_numbers(tmp_path: Path) -> None:
    """U8 codes and scales, FP32 norms and tables: the same draft, and with scales kept the same bytes again."""
    tensors = random_official("v4")
    for name, tensor in tensors.items():
        if tensor.dtype in (torch.int8, torch.float8_e8m0fnu) and ".1." in name:
            tensors[name] = tensor.view(torch.uint8)
        elif name.endswith(("norm.weight", "markov_w1.weight")):
            tensors[name] = tensor.float()
    folder = write_official(tmp_path / "in", "v4", tensors)
    import_dspark(folder, tmp_path / "ours", V4, keep_scales=True)
    values = expected("v4")
    assert all(torch.equal(each.double(), values[name]) for name, each in stored_tensors(tmp_path / "ours").items())
    export_dspark(tmp_path / "ours", tmp_path / "out", V4, form="official", keep_scales=True)
    back = stored_tensors(tmp_path / "out")
    assert back.keys() == tensors.keys() and all(same_bytes(back[name], each) for name, each in tensors.items())


def test_float32_holds_what_bfloat16_would_round(tmp_path: Path) -> None:
    tensors = random_official("v4")
    tensors["mtp.2.norm.weight"] = torch.full((160,), 1 + 2.0**-20)
    folder = write_official(tmp_path / "in", "v4", tensors)
    with pytest.raises(CheckpointError, match=r"mtp\.2\.norm\.weight holds numbers that torch\.bfloat16 would round"):
        import_dspark(folder, tmp_path / "ours", V4)
    import_dspark(folder, tmp_path / "ours", V4, dtype="float32")
    found = stored_tensors(tmp_path / "ours")
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert torch.equal(found["norm.weight"], tensors["mtp.2.norm.weight"])
    done = export_dspark(tmp_path / "ours", tmp_path / "out", V4)
    assert done.notes == ("rounded to what bf16 holds: 1 tensors: mtp.2.norm.weight",)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "float32"


def test_trained_values_are_rounded_and_it_is_said(copy, tmp_path: Path) -> None:
    """Quantised to the nearest, as storage does; but not under scales that were kept."""
    folder = copy("v4", "ours")
    torch.manual_seed(1)
    trained = torch.randn(72, 160)
    faults.put(Q_A, lambda old: trained)(folder)
    done = export_dspark(folder, tmp_path / "official", V4, form="official")
    assert done.notes == (f"rounded to what official holds: 1 tensors: {WQ_A}.weight",)
    found = stored_tensors(tmp_path / "official")
    value = naive_value(found[f"{WQ_A}.weight"], found[f"{WQ_A}.scale"], (128, 128))
    assert 0 < (value - trained).abs().max() < 2.0**-4 * trained.abs().max()
    assert export_dspark(folder, tmp_path / "bf16", V4).notes == (
        f"rounded to what bf16 holds: 1 tensors: {WQ_A}.weight",
    )
    assert same_bytes(stored_tensors(tmp_path / "bf16")[f"{WQ_A}.weight"], trained.bfloat16())
    with pytest.raises(CheckpointError, match=rf"{WQ_A}\.weight has values that its kept scales did not give"):
        export_dspark(folder, tmp_path / "kept", V4, form="official", keep_scales=True)


# the ends of the formats


def codes_of(shape: tuple[int, int], byte: int, kind: str) -> torch.Tensor:
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.int8
    return torch.full(shape, byte, dtype=torch.uint8).view(dtype)


ENDS = {
    "mtp.0.ffn.experts.0.w1": ("fp4", 0x21, 127, (0.5, 1.0)),
    "mtp.0.ffn.experts.1.w1": ("fp4", 0x10, 128, (0.0, 1.0)),
    "mtp.0.ffn.experts.2.w1": ("fp4", 0xF7, 126, (3.0, -3.0)),
    "mtp.0.ffn.experts.3.w1": ("fp4", 0x8C, 127, (-2.0, -0.0)),
    "mtp.1.ffn.experts.0.w1": ("fp4", 0x11, 0, (2.0**-128, 2.0**-128)),
    "mtp.1.ffn.experts.1.w1": ("fp4", 0x22, 254, (2.0**127, 2.0**127)),
    "mtp.1.ffn.experts.2.w1": ("fp4", 0x53, 110, (1.5 * 2.0**-17, 3 * 2.0**-17)),
    "mtp.0.attn.wq_a": ("fp8", 0x38, 0, (2.0**-127, 2.0**-127)),
    "mtp.1.attn.wq_a": ("fp8", 0x39, 1, (1.125 * 2.0**-126, 1.125 * 2.0**-126)),
    "mtp.2.attn.wq_a": ("fp8", 0x38, 254, (2.0**127, 2.0**127)),
    "mtp.0.attn.wkv": ("fp8", 0x10, 0, (2.0**-132, 2.0**-132)),
    "mtp.1.attn.wkv": ("fp8", 0xFE, 127, (-448.0, -448.0)),
    "mtp.2.attn.wkv": ("fp8", 0x01, 127, (2.0**-9, 2.0**-9)),
    "mtp.0.attn.wq_b": ("fp8", 0x80, 130, (-0.0, -0.0)),
}
"""A matrix -> (its format, the byte that it is full of, its scales' byte, values of an even and an odd column)."""


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_codes_and_scales_at_the_ends(tmp_path: Path, variant: str) -> None:
    """Exact in BF16 both ways, with kept scales and with new ones."""
    tensors, kind = random_official(variant), VARIANTS[variant]
    for name, (form, code, scale, _) in ENDS.items():
        weight, scales = tensors[f"{name}.weight"], tensors[f"{name}.scale"]
        tensors[f"{name}.weight"] = codes_of(weight.shape, code, form)
        tensors[f"{name}.scale"] = torch.full(scales.shape, scale, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    folder = write_official(tmp_path / "in", variant, tensors)
    import_dspark(folder, tmp_path / "ours", kind, keep_scales=True)
    found = stored_tensors(tmp_path / "ours")
    for name, (_, _, _, value) in ENDS.items():
        stage, part = name[4], name.rsplit(".", 1)[1]
        if ".experts." in name:
            ours = found[f"layers.{stage}.mlp.experts.gate_up_proj"][int(name.split(".")[4]), :96].clone()
        else:
            ours = found[f"layers.{stage}.self_attn.{part[1:]}_proj.weight"]
        wanted = torch.tensor(value, dtype=torch.bfloat16).repeat(ours.shape[0], ours.shape[1] // 2)
        assert same_bytes(ours, wanted), name
    export_dspark(tmp_path / "ours", tmp_path / "bytes", kind, form="official", keep_scales=True)
    back = stored_tensors(tmp_path / "bytes")
    assert all(same_bytes(back[each], tensors[each]) for each in tensors)
    assert not export_dspark(tmp_path / "ours", tmp_path / "values", kind, form="official").notes
    import_dspark(tmp_path / "values", tmp_path / "again", kind)
    again = stored_tensors(tmp_path / "again")
    assert all(same_bytes(again[each], found[each]) for each in found)


@pytest.mark.parametrize(
    ("name", "kind", "code", "scale", "message"),
    [
        (W1, "fp4", 0x21, 255, rf"scale {W1}\.scale holds NaN"),
        (WQ_A, "fp8", 0x38, 255, rf"scale {WQ_A}\.scale holds NaN"),
        (WQ_A, "fp8", 0x7F, 127, rf"{WQ_A}\.weight holds NaN or infinity"),
        (W1, "fp4", 0x77, 254, rf"{W1}\.weight holds NaN or infinity in torch\.bfloat16"),
        (WQ_A, "fp8", 0x01, 0, rf"{WQ_A}\.weight holds numbers that torch\.bfloat16 would round, .* float32"),
    ],
)
def test_what_no_value_can_be_made_of(
    tmp_path: Path, name: str, kind: str, code: int, scale: int, message: str
) -> None:
    """Found while values are read; nothing stays."""
    tensors = random_official("v41")
    tensors[f"{name}.weight"] = codes_of(tensors[f"{name}.weight"].shape, code, kind)
    tensors[f"{name}.scale"].view(torch.uint8)[0, 0] = scale
    folder = write_official(tmp_path / "in", "v41", tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        import_dspark(folder, tmp_path / "deep" / "ours", V41, shard_bytes=SMALL_SHARD)
    assert str(folder) in str(caught.value)
    assert not (tmp_path / "deep" / "ours").exists()


# the files themselves


def test_shards_keep_their_size_and_their_alignment(made, tmp_path: Path) -> None:
    """Only a tensor that is larger alone has a larger shard; every tensor begins at a multiple of its item."""
    ours = made["v4"]["ours"]
    found, notes = list_stored(ours)
    by_shard: dict[str, list[int]] = {}
    for stored in found.values():
        by_shard.setdefault(stored.shard, []).append(stored.num_bytes)
    assert all(sum(sizes) <= SMALL_SHARD or len(sizes) == 1 for sizes in by_shard.values()) and len(by_shard) > 5
    assert "official_scales.safetensors" in notes[0]
    export_dspark(ours, tmp_path / "out", V4, form="official")
    for path in (*ours.glob("*.safetensors"), *(tmp_path / "out").glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                width = checkpoint_reader.ITEM_BYTES[entry["dtype"]]
                assert entry["data_offsets"][0] % width == 0, name


def test_a_piece_of_another_dtype_is_our_own_fault(tmp_path: Path) -> None:
    for piece in (torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)):
        with pytest.raises(AssertionError):
            stream.stream_file(tmp_path / "x", [stream.Planned("x", "BF16", (2,), lambda piece=piece: [piece])])


def test_slices_have_names_of_their_own() -> None:
    (stack,) = [each for each in draft_tensors(table_of("v4")) if each.name == STACK]
    assert sliced_names(stack, 1) == [(STACK, range(4))]
    assert sliced_names(stack, 2) == [(f"{STACK}.0of2", range(2)), (f"{STACK}.1of2", range(2, 4))]
    assert folder_module._DRAFT_NAME.match(f"{STACK}.0of2") and not folder_module._DRAFT_NAME.match(
        "layers.0.attn.wq_a"
    )
