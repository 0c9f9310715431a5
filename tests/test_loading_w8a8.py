"""Weights of numerics w8a8: equal bits however they are made, codes and scales against FP64, memory, the plan."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import checkpoint_faults as faults
import pytest
import torch
from test_loader_memory import MIB, STATUS, rise_of

from meshspark.models.checkpoint import fill
from meshspark.models.checkpoint.forms import is_int8, scale_key
from meshspark.models.checkpoint.hold import quantise_weights
from meshspark.models.checkpoint.loader import load_weights
from meshspark.models.checkpoint.names import held_table
from meshspark.models.checkpoint.reader import CheckpointError
from meshspark.models.checkpoint.share import shard_weights, share_bytes
from meshspark.models.checkpoint.synthetic import random_weights, synthesize
from meshspark.models.checkpoint.writer import write_checkpoint
from meshspark.models.numerics import BFLOAT16, FLOAT32, W8A8
from meshspark.models.v4.config import V4Config, tiny, tiny_thirds
from meshspark.models.v4.sizing import held_weights, weight_parts
from meshspark.parallel.topology import Topology

SEED = 11
SMALL = replace(tiny(), num_hidden_layers=3, compress_ratios=(0, 4, 128), n_routed_experts=8)
FORMS = {
    "fp4 experts": SMALL,
    "small blocks": replace(SMALL, weight_block_size=(48, 24)),
    "fp8 experts": replace(SMALL, expert_dtype="fp8"),
    "thirds": replace(tiny_thirds(), num_hidden_layers=3, compress_ratios=(0, 4, 128), n_routed_experts=6),
}
"""Shapes: FP4 and FP8 experts, groups and row chunks that cut blocks of scales."""

TOPOLOGIES = {
    "fp4 experts": [(2, 1, 2), (2, 2, 2), (4, 2, 4), (4, 4, 4)],
    "small blocks": [(8, 8, 8)],
    "fp8 experts": [(4, 1, 4)],
    "thirds": [(6, 3, 6)],
}
WO_B = "layers.0.attn.wo_b.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A synthetic checkpoint of each shape; never written to."""
    made = {name: tmp_path_factory.mktemp("w8a8") / "folder" for name in FORMS}
    for name, folder in made.items():
        synthesize(folder, FORMS[name], SEED, shard_bytes=400_000)
    return made


def assert_equal_weights(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("form", FORMS)
def test_loading_gives_the_same_bits_on_every_topology(folders, form, monkeypatch) -> None:
    """Of loading, of sharding what one rank loads, and of quantising float weights; the bytes are the plan's."""
    config = FORMS[form]
    if form == "small blocks":
        # 13 rows of 64 inputs at a time: no multiple of anything else here.
        monkeypatch.setattr(fill, "CHUNK_ELEMENTS", 13 * 64)
    full = quantise_weights(random_weights(config, SEED, FLOAT32), config)
    assert_equal_weights(random_weights(config, SEED, W8A8), full)
    _, alone = load_weights(folders[form], Topology(), 0, W8A8)
    assert_equal_weights(alone, full)
    for sizes in TOPOLOGIES[form]:
        topology = Topology(*sizes)
        for rank in range(topology.world):
            _, share = load_weights(folders[form], topology, rank, W8A8)
            assert_equal_weights(share, shard_weights(full, topology, rank, config))
            assert not share.notes
            allocated = sum(t.untyped_storage().nbytes() for t in share.values())
            assert allocated == sum(weight_parts(config, topology, W8A8, rank=rank).values())
            assert allocated == share_bytes(config, topology, rank, W8A8)


def test_what_is_held_in_which_dtype(folders: dict[str, Path]) -> None:
    """model.md 9.2: INT8 where the product is, BF16 for the other products, FP32 for gates, norms and streams."""
    _, share = load_weights(folders["fp4 experts"], Topology(4, 2, 4), 1, W8A8)
    dtypes: dict[str, set[torch.dtype]] = {}
    for name, tensor in share.items():
        dtypes.setdefault(re.sub(r"^layers\.\d+\.", "", name), set()).add(tensor.dtype)
    experts = [f"{kind}.{w}" for kind in ("ffn.experts", "ffn.shared_experts") for w in ("w1", "w2", "w3")]
    codes = ["attn.wq_b", "attn.wo_b", "attn.indexer.wq_b", *experts]
    halves = ["embed", "head", "attn.wq_a", "attn.wkv", "attn.wo_a", "attn.indexer.weights_proj"]
    halves += [f"attn.{part}compressor.{w}" for part in ("", "indexer.") for w in ("wkv", "wgate")]
    for names, suffix, dtype in ((codes, "weight", torch.int8), (halves, "weight", torch.bfloat16)):
        assert all(dtypes.pop(f"{name}.{suffix}") == {dtype} for name in names)
    assert dtypes.pop("ffn.gate.tid2eid") == {torch.int64}
    assert {dtypes.pop(f"{name}.scale") == {torch.float32} for name in codes} == {True}
    assert set.union(*dtypes.values()) == {torch.float32}
    assert share["layers.0.ffn.experts.w2.scale"].shape == (2, 64), "stacked experts: [X, O]"
    assert share[WO_B].shape == (64, 128) and share[scale_key(WO_B)].shape == (64,)


def oracle(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of one weight in FP64, one number at a time."""
    codes, scales = [], []
    for row in weight_OI.tolist():
        amplitude = max(1e-4, *(abs(value) for value in row))
        # Python's round takes ties to even.
        codes.append([max(-127, min(127, round(value * 127 / amplitude))) for value in row])
        scales.append(amplitude / 127)
    return torch.tensor(codes, dtype=torch.int8), torch.tensor(scales, dtype=torch.float64).float()


@pytest.mark.parametrize("form", ["fp4 experts", "fp8 experts"])
def test_codes_and_scales_are_those_of_fp64(folders: dict[str, Path], form: str) -> None:
    config = FORMS[form]
    full = random_weights(config, SEED, FLOAT32)
    _, share = load_weights(folders[form], Topology(), 0, W8A8)
    checked = 0
    for name, specs in held_table(config).items():
        if is_int8(specs[0], W8A8) and (".experts." not in name or ".0." in name):
            matrices = full[name].double().reshape(-1, *full[name].shape[-2:])
            wanted = [oracle(matrix) for matrix in matrices]
            assert torch.equal(share[name].reshape(matrices.shape), torch.stack([codes for codes, _ in wanted])), name
            scales = torch.stack([scale for _, scale in wanted])
            assert torch.equal(share[scale_key(name)].reshape(scales.shape), scales), name
            checked += 1
    assert checked == 3 * (2 + 3) + 1 + 3


def test_odd_channels(tmp_path: Path) -> None:
    """All zero, below the floor, one outlier, and an outlier that another tp_rank holds."""
    full = dict(random_weights(SMALL, SEED, FLOAT32))
    weight = full[WO_B] = full[WO_B].clone()
    weight[0], weight[1], weight[2] = 0.0, 2.0**-20, 2.0**-9
    weight[2, 0] = 448.0
    weight[3, -1] = -448.0
    write_checkpoint(tmp_path, SMALL, full)
    stored = load_weights(tmp_path, Topology(), 0, FLOAT32)[1][WO_B]
    codes, scale = oracle(stored.double())
    for tp in (1, 4):
        for rank in range(tp):
            _, share = load_weights(tmp_path, Topology(tp, tp, tp), rank, W8A8)
            assert torch.equal(share[WO_B], codes.chunk(tp, dim=1)[rank])
            assert torch.equal(share[scale_key(WO_B)], scale)
    assert not codes[0].any() and scale[0] == torch.tensor(1e-4) / 127 == scale[1]
    assert codes[2, 0] == 127 and codes[3, -1] == -127 and codes[3, :-1].abs().max() < 2


def test_scales_of_blocks_that_are_no_powers_of_two_are_noted(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["fp4 experts"], tmp_path / "odd"))
    faults.put("layers.1.attn.wq_b.scale", lambda old: torch.full(old.shape, 0.3))(folder)
    _, share = load_weights(folder, Topology(), 0, W8A8)
    assert share.notes == ("not exact in w8a8, rounded: layers.1.attn.wq_b.weight",)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("layers.1.ffn.experts.1.w1.scale", lambda t: t.view(torch.uint8).fill_(255), "scale .*1.w1.scale holds NaN"),
        (WO_B, lambda t: t.view(torch.uint8)[63, -1:].fill_(0x7F), r"0\.attn\.wo_b\.weight holds NaN .* torch.float32"),
    ],
)
def test_numbers_that_are_none_are_refused(folders, tmp_path, name, change, message) -> None:
    """Also by a rank that does not keep it: a channel's scale is of all columns of wo_b."""
    folder = Path(shutil.copytree(folders["fp4 experts"], tmp_path / "nan"))
    faults.edit_shard(folder, name, lambda tensors: change(tensors[name]))
    with pytest.raises(CheckpointError, match=message):
        load_weights(folder, Topology(4, 4, 4), 0, W8A8)


# sizes


def test_the_plan_counts_the_scales_of_stacked_experts() -> None:
    stack = held_weights(SMALL, Topology(), W8A8)["layers.0.ffn.experts.w1.weight"]
    wide, narrow = SMALL.hidden_size, SMALL.moe_intermediate_size
    assert stack.num_bytes == SMALL.n_routed_experts * narrow * (wide + 4)


def heavy_config() -> V4Config:
    """One weight of 128 MiB in FP32, of 32 in INT8; all the rest is small."""
    return replace(
        tiny(), num_hidden_layers=1, compress_ratios=(0,), num_attention_heads=64, head_dim=512, q_lora_rank=1024
    )


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc/self/status, as on Linux")
def test_a_large_weight_has_no_float_copy_beside_it(tmp_path: Path) -> None:
    config = heavy_config()
    synthesize(tmp_path, config, 5)
    share, largest = share_bytes(config, Topology(), 0, W8A8), 4 * 64 * 512 * 1024
    rise = rise_of(tmp_path, (1, 1, 1), 0, "w8a8")
    assert share < rise < share + largest // 2, f"{rise / MIB:.0f} MiB for a share of {share / MIB:.0f} MiB"


# who takes which weights


def test_weights_and_numerics_must_fit(folders: dict[str, Path]) -> None:
    _, codes = load_weights(folders["fp4 experts"], Topology(), 0, W8A8)
    _, halves = load_weights(folders["fp4 experts"], Topology(), 0, BFLOAT16)
    codes.require(Topology(), 0, W8A8)
    halves.require(Topology(), 0, BFLOAT16)
    with pytest.raises(ValueError, match="held in w8a8, but is used with numerics float32"):
        codes.require(Topology(), 0, FLOAT32)
    with pytest.raises(ValueError, match="held in floats, but is used with numerics w8a8"):
        halves.require(Topology(), 0, W8A8)


def test_quantise_weights_takes_floats_alone() -> None:
    config = replace(SMALL, draft_ratios=(0,))
    full = random_weights(config, SEED, FLOAT32, draft=True)
    held = quantise_weights(full, config)
    assert held["mtp.0.e_proj.weight"].dtype == held["mtp.0.ffn.experts.w1.weight"].dtype == torch.int8
    assert held["mtp.0.ffn.experts.w1.scale"].shape == (8, 32)
    assert_equal_weights(quantise_weights({n: t.bfloat16() if t.dtype == torch.float32 and ".attn.w" in n else t
                                           for n, t in full.items()}, config), held)  # fmt: skip
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.wq_b\.weight is torch\.int8, allowed: a floating dtype"):
        quantise_weights(held, config)
    del full["norm.weight"]
    with pytest.raises(ValueError, match=r"norm\.weight is missing"):
        quantise_weights(full, config)
