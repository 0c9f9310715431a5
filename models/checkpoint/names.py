"""The name table: every tensor of the official layout with its shape, stored form, shard axis and stage."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..v4.config import V4Config
from ..v4.quant import FP4, QuantSpec, fp8


@dataclass(frozen=True)
class TensorSpec:
    """One named weight of the official layout.

    shape is logical; stored_shape and dtype (safetensors' name) are the file's. quant names the block format of a
    weight that has a scale tensor (scale_name, scale_shape; F8_E8M0), None of one that has not.
    shard: "none", "experts" (by expert), "group_rows" and "group_columns" (rows or columns by output group),
    "vocab" (rows by vocabulary). role: "matmul" is held in the activation dtype, "wide" in the accumulation
    dtype, "ids" as int64. stage: the part of the forward that uses it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored_shape: tuple[int, ...]
    scale_name: str | None
    scale_shape: tuple[int, ...] | None
    quant: QuantSpec | None
    shard: str
    role: str
    stage: str

    @property
    def is_draft(self) -> bool:
        return self.name.startswith("mtp.")

    @property
    def expert(self) -> int | None:
        """Index of the routed expert that this weight belongs to, None for other weights."""
        return int(self.name.split(".experts.")[1].split(".")[0]) if self.shard == "experts" else None

    @property
    def held_name(self) -> str:
        """Key of the weight in a model's weights: routed experts are stacked under one key without their index."""
        if self.shard != "experts":
            return self.name
        front, back = self.name.split(".experts.")
        return f"{front}.experts.{back.split('.', 1)[1]}"


@lru_cache(maxsize=8)
def tensor_table(config: V4Config) -> tuple[TensorSpec, ...]:
    """All weights of the target, then of mtp.*: one MTP layer per draft ratio, or the stages of a DSpark drafter.

    Scales are named by their weights' specs and have no entry of their own.
    """
    return tuple(_target(config)) + draft_table(config)


def draft_table(config: V4Config) -> tuple[TensorSpec, ...]:
    """The weights of mtp.* alone, as `tensor_table` has them."""
    return tuple(_draft(config))


def held_table(config: V4Config, *, draft: bool = False) -> dict[str, tuple[TensorSpec, ...]]:
    """Key in a model's weights -> its specs: the experts' own in order for a stack, one otherwise."""
    held: dict[str, list[TensorSpec]] = {}
    for spec in tensor_table(config):
        if draft or not spec.is_draft:
            held.setdefault(spec.held_name, []).append(spec)
    return {name: tuple(specs) for name, specs in held.items()}


def _target(c: V4Config) -> Iterator[TensorSpec]:
    yield _bf16("embed.weight", (c.vocab_size, c.hidden_size), "embed", role="matmul")
    for layer, ratio in enumerate(c.compress_ratios):
        yield from _block(c, f"layers.{layer}.", ratio, is_hash=c.is_hash_layer(layer))
    yield from _readout(c, "", "lm_head")
    yield _bf16("head.weight", (c.vocab_size, c.hidden_size), "lm_head", shard="vocab")


def _draft(c: V4Config) -> Iterator[TensorSpec]:
    last = len(c.draft_ratios) - 1
    for index, ratio in enumerate(c.draft_ratios):
        prefix = f"mtp.{index}."
        yield from _block(c, prefix, ratio, is_hash=False)
        if c.dspark is None:
            yield from _mtp_front(c, prefix)
        elif index == 0:
            taps = c.hidden_size * len(c.dspark.target_layer_ids)
            yield _fp8(c, f"{prefix}main_proj.weight", (c.hidden_size, taps), "draft")
            yield _bf16(f"{prefix}main_norm.weight", (c.hidden_size,), "draft")
        if c.dspark is None or index == last:
            yield from _readout(c, prefix, "draft")
        if c.dspark is not None and index == last:
            yield from _dspark_heads(c, prefix, c.dspark.markov_rank)


def _mtp_front(c: V4Config, prefix: str) -> Iterator[TensorSpec]:
    for name in ("e_proj", "h_proj"):
        yield _fp8(c, f"{prefix}{name}.weight", (c.hidden_size, c.hidden_size), "draft")
    for name in ("enorm", "hnorm"):
        yield _bf16(f"{prefix}{name}.weight", (c.hidden_size,), "draft")


def _dspark_heads(c: V4Config, prefix: str, rank: int) -> Iterator[TensorSpec]:
    for name in ("markov_w1", "markov_w2"):
        yield _bf16(f"{prefix}markov_head.{name}.weight", (c.vocab_size, rank), "markov")
    yield _bf16(f"{prefix}confidence_head.proj.weight", (1, c.hidden_size + rank), "markov")


def _readout(c: V4Config, prefix: str, stage: str) -> Iterator[TensorSpec]:
    yield _bf16(f"{prefix}norm.weight", (c.hidden_size,), stage)
    yield _f32(f"{prefix}hc_head_fn", (c.hc_mult, c.hc_mult * c.hidden_size), stage)
    yield _f32(f"{prefix}hc_head_base", (c.hc_mult,), stage)
    yield _f32(f"{prefix}hc_head_scale", (1,), stage)


def _block(c: V4Config, prefix: str, ratio: int, *, is_hash: bool) -> Iterator[TensorSpec]:
    mixes = (2 + c.hc_mult) * c.hc_mult
    for part in ("attn", "ffn"):
        yield _f32(f"{prefix}hc_{part}_fn", (mixes, c.hc_mult * c.hidden_size), "hc_pre")
        yield _f32(f"{prefix}hc_{part}_base", (mixes,), "hc_pre")
        yield _f32(f"{prefix}hc_{part}_scale", (3,), "hc_pre")
    yield _bf16(f"{prefix}attn_norm.weight", (c.hidden_size,), "qkv")
    yield from _attention(c, f"{prefix}attn.")
    if ratio:
        yield from _compressor(c, f"{prefix}attn.compressor.", ratio, c.head_dim, "compress")
    if ratio == 4:
        yield from _indexer(c, f"{prefix}attn.indexer.", ratio)
    yield _bf16(f"{prefix}ffn_norm.weight", (c.hidden_size,), "gate")
    yield from _ffn(c, f"{prefix}ffn.", is_hash=is_hash)


def _attention(c: V4Config, prefix: str) -> Iterator[TensorSpec]:
    low_rank = c.o_groups * c.o_lora_rank
    yield _f32(f"{prefix}attn_sink", (c.num_attention_heads,), "attend")
    yield _fp8(c, f"{prefix}wq_a.weight", (c.q_lora_rank, c.hidden_size), "qkv")
    yield _bf16(f"{prefix}q_norm.weight", (c.q_lora_rank,), "qkv")
    yield _fp8(c, f"{prefix}wq_b.weight", (c.num_attention_heads * c.head_dim, c.q_lora_rank), "qkv")
    yield _fp8(c, f"{prefix}wkv.weight", (c.head_dim, c.hidden_size), "qkv")
    yield _bf16(f"{prefix}kv_norm.weight", (c.head_dim,), "qkv")
    yield _fp8(c, f"{prefix}wo_a.weight", (low_rank, c.group_columns), "publish", "group_rows")
    yield _fp8(c, f"{prefix}wo_b.weight", (c.hidden_size, low_rank), "publish", "group_columns")


def _compressor(c: V4Config, prefix: str, ratio: int, head_dim: int, stage: str) -> Iterator[TensorSpec]:
    width = head_dim * (2 if ratio == 4 else 1)
    for name in ("wkv", "wgate"):
        yield _bf16(f"{prefix}{name}.weight", (width, c.hidden_size), stage)
    yield _f32(f"{prefix}ape", (ratio, width), stage)
    yield _bf16(f"{prefix}norm.weight", (head_dim,), stage)


def _indexer(c: V4Config, prefix: str, ratio: int) -> Iterator[TensorSpec]:
    yield _fp8(c, f"{prefix}wq_b.weight", (c.index_n_heads * c.index_head_dim, c.q_lora_rank), "index")
    yield _bf16(f"{prefix}weights_proj.weight", (c.index_n_heads, c.hidden_size), "index", role="matmul")
    yield from _compressor(c, f"{prefix}compressor.", ratio, c.index_head_dim, "index")


def _ffn(c: V4Config, prefix: str, *, is_hash: bool) -> Iterator[TensorSpec]:
    yield _bf16(f"{prefix}gate.weight", (c.n_routed_experts, c.hidden_size), "gate")
    if is_hash:
        shape = (c.vocab_size, c.num_experts_per_tok)
        yield TensorSpec(f"{prefix}gate.tid2eid", shape, "I64", shape, None, None, None, "none", "ids", "gate")
    else:
        yield _f32(f"{prefix}gate.bias", (c.n_routed_experts,), "gate")
    wide, narrow = (c.moe_intermediate_size, c.hidden_size), (c.hidden_size, c.moe_intermediate_size)
    shapes = {"w1": wide, "w2": narrow, "w3": wide}
    for name, shape in shapes.items():
        yield _fp8(c, f"{prefix}shared_experts.{name}.weight", shape, "experts")
    for expert in range(c.n_routed_experts):
        for name, shape in shapes.items():
            yield _expert(c, f"{prefix}experts.{expert}.{name}.weight", shape)


def _plain(name: str, shape: tuple[int, ...], dtype: str, stage: str, shard: str, role: str) -> TensorSpec:
    return TensorSpec(name, shape, dtype, shape, None, None, None, shard, role, stage)


def _bf16(name: str, shape: tuple[int, ...], stage: str, *, shard: str = "none", role: str = "wide") -> TensorSpec:
    return _plain(name, shape, "BF16", stage, shard, role)


def _f32(name: str, shape: tuple[int, ...], stage: str) -> TensorSpec:
    return _plain(name, shape, "F32", stage, "none", "wide")


def _fp8(c: V4Config, name: str, shape: tuple[int, int], stage: str, shard: str = "none") -> TensorSpec:
    return _scaled(name, shape, "F8_E4M3", fp8(c.weight_block_size), stage, shard)


def _expert(c: V4Config, name: str, shape: tuple[int, int]) -> TensorSpec:
    if c.expert_dtype == "fp4":
        return _scaled(name, shape, "I8", FP4, "experts", "experts")
    return _fp8(c, name, shape, "experts", "experts")


def _scaled(name: str, shape: tuple[int, int], dtype: str, quant: QuantSpec, stage: str, shard: str) -> TensorSpec:
    return TensorSpec(
        name=name,
        shape=shape,
        dtype=dtype,
        stored_shape=quant.stored_shape(shape),
        scale_name=f"{name.removesuffix('.weight')}.scale",
        scale_shape=quant.scale_shape(shape),
        quant=quant,
        shard=shard,
        role="matmul",
        stage=stage,
    )
