"""The name table against the published totals of the official releases."""

from collections import Counter
from dataclasses import replace
from math import prod

from meshspark.models.checkpoint.inventory import format_inventory, preset_inventory
from meshspark.models.checkpoint.names import held_table, tensor_table
from meshspark.models.v4.config import flash, flash_dspark, tiny


def test_flash_totals_are_the_published_ones():
    found = preset_inventory(flash())
    assert (found.tensors, found.num_bytes) == (69_187, 159_609_485_896)
    assert found.dtypes == {
        "BF16": 433, "F32": 417, "F8_E4M3": 375, "F8_E8M0": 34_167, "I64": 3, "I8": 33_792,
    }  # fmt: skip
    assert found.parts["draft"].tensors == 1575
    assert round((found.parameters - found.parts["draft"].parameters) / 1e9, 2) == 284.33
    assert format_inventory(found)["bytes"] == found.num_bytes


def test_dspark_totals_and_drafter_tally():
    config = flash_dspark()
    assert preset_inventory(config).num_bytes == 166_878_536_440
    drafter = [spec for spec in tensor_table(config) if spec.is_draft]
    assert Counter(spec.dtype for spec in drafter) == {"I8": 2304, "F8_E4M3": 25, "BF16": 20, "F32": 27}
    assert sum(spec.scale_name is not None for spec in drafter) == 2329
    assert sum(1 + (spec.scale_name is not None) for spec in drafter) == 4705
    assert sum(prod(spec.shape) for spec in drafter) == 19_845_850_983
    part = preset_inventory(config).parts["draft"]
    assert (part.tensors, part.parameters) == (4705, 19_845_850_983)
    shapes = {spec.name: spec.shape for spec in drafter}
    assert shapes["mtp.0.main_proj.weight"] == (4096, 12288)
    assert shapes["mtp.2.confidence_head.proj.weight"] == (1, 4352)
    assert not [name for name in shapes if name.endswith(("e_proj.weight", "enorm.weight", "tid2eid"))]
    assert not [name for name in shapes if name.startswith("mtp.3.")]


def test_shapes_dtypes_and_scales_of_flash():
    table = {spec.name: spec for spec in tensor_table(flash())}
    expert = table["layers.5.ffn.experts.255.w2.weight"]
    assert (expert.shape, expert.stored_shape, expert.dtype) == ((4096, 2048), (4096, 1024), "I8")
    assert (expert.scale_name, expert.scale_shape) == ("layers.5.ffn.experts.255.w2.scale", (4096, 64))
    assert (expert.expert, expert.held_name) == (255, "layers.5.ffn.experts.w2.weight")
    wo_b = table["layers.0.attn.wo_b.weight"]
    assert (wo_b.shape, wo_b.dtype, wo_b.scale_shape, wo_b.shard) == (
        (4096, 8192),
        "F8_E4M3",
        (32, 64),
        "group_columns",
    )
    assert table["layers.2.ffn.gate.tid2eid"].role == "ids"
    assert "layers.2.ffn.gate.bias" not in table and "layers.3.ffn.gate.tid2eid" not in table
    assert table["mtp.0.e_proj.weight"].scale_name == "mtp.0.e_proj.scale"
    assert [name for name in table if name.startswith("layers.0.attn.compressor")] == []
    assert table["layers.2.attn.compressor.ape"].shape == (4, 1024)
    assert table["layers.3.attn.compressor.ape"].shape == (128, 512)


def test_dtypes_by_role():
    wide = {s.name.split(".", 2)[-1] for s in tensor_table(tiny()) if s.role == "wide" and s.name.startswith("layers.")}
    assert {"attn.attn_sink", "attn.compressor.wkv.weight", "ffn.gate.weight", "attn.indexer.compressor.ape"} <= wide
    matmul = {s.name.split(".", 2)[-1] for s in tensor_table(tiny()) if s.role == "matmul"}
    assert {"attn.wq_a.weight", "attn.indexer.weights_proj.weight", "ffn.shared_experts.w1.weight"} <= matmul
    assert not wide & matmul


def test_fp8_experts_and_block_size_follow_the_config():
    config = replace(tiny(), expert_dtype="fp8", weight_block_size=(32, 16))
    spec = next(s for s in tensor_table(config) if s.expert == 3 and ".w1." in s.name)
    assert (spec.dtype, spec.stored_shape, spec.scale_shape) == ("F8_E4M3", (32, 64), (1, 4))


def test_stacks_hold_experts_in_order():
    held = held_table(tiny())
    assert [s.expert for s in held["layers.1.ffn.experts.w3.weight"]] == list(range(16))
    assert sum(len(specs) for specs in held.values()) == len(tensor_table(tiny()))
    assert len({s.name for s in tensor_table(flash_dspark())}) == len(tensor_table(flash_dspark()))
