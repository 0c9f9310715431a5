"""The row-independence self-check: do this machine's products give a row the same bits in any company?

Every product that the model runs (row_linear at its widths and dtypes, tile products, softmax, reductions), and
those of its drafter where the config has one, is run at small row counts and compared with slices of one larger call.
"""

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..comm.agreement import agree
from ..layouts.bits import same_bits
from ..layouts.tiles import DENSE_LIMIT, MIN_WIDTH, TILE
from ..parallel.groups import Groups
from .functions import ROW_MULTIPLE, SMALL_PRODUCT, mean_square_rsqrt, row_linear, sigmoid_inverse, tile_product
from .matrix import DenseWeight
from .numerics import BFLOAT16, FLOAT32, W8A8, Numerics
from .v4.config import V4Config, tiny
from .v4.hyper import sinkhorn
from .v4.moe import batched_linear

LARGE_ROWS = 96
ROW_COUNTS = (1, 3, 4, 7, 8, 12, 64)
OFFSETS = (0, 5, 32)
EXPERT_BATCHES = (1, 3)
MOST_OUTPUTS = 4096
"""Wider products are tried at this many outputs: how rows are treated depends on the inputs' width."""


def row_independence(
    config: V4Config | None = None, modes: tuple[Numerics, ...] = (FLOAT32, BFLOAT16, W8A8)
) -> dict[str, Any]:
    """{"holds": bool, "details": one line per product that fails}; config: whose widths are tried (default tiny)."""
    config = tiny() if config is None else config
    failures = [name for name, product in _products(config, modes) if not _independent(product)]
    return {"holds": not failures, "details": failures}


def holds_everywhere(groups: Groups, config: V4Config, mode: Numerics) -> bool:
    """Whether the check holds on every rank and all have one CPU capability and torch. All ranks call it.

    It tries the CPU's products; of other devices, and of FP64, nothing is promised.
    """
    here = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {groups.device}"
    tried = groups.device == "cpu" and mode.activation != torch.float64
    verdict = int(tried and row_independence(config, (mode,))["holds"])
    records = agree([verdict, zlib.crc32(here.encode())], groups, stage="self_check")
    return all(record == [1, records[0][1]] for record in records)


Product = tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]


def _independent(product: Product) -> bool:
    run, rows = product
    whole = run(rows)
    for count in ROW_COUNTS:
        for offset in OFFSETS:
            part = slice(offset, offset + count)
            if not len(rows[part]):
                continue
            if not same_bits(run(rows[part].clone()), whole[part]):
                return False
    return True


def _products(config: V4Config, modes: tuple[Numerics, ...]) -> Iterator[tuple[str, Product]]:
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    for mode in modes:
        if mode.quantisation is not None:
            yield from _packed_products(config, noise)
            continue
        for dtype, inputs, outputs in sorted(_linears(config, mode), key=str):
            weight = noise(outputs, inputs, dtype=dtype)
            name = f"linear {dtype} {inputs} -> {outputs}"
            yield name, (partial(_linear, weight), noise(LARGE_ROWS, inputs, dtype=dtype))
        yield from _group_products(config, mode, noise)
        yield from _expert_products(config, mode, noise)
    yield from _attention_products(config, noise)
    yield from _block_products(config, noise)
    h = config.hc_mult
    yield "sinkhorn", (lambda x: sinkhorn(x, config.hc_sinkhorn_iters, config.hc_eps), noise(LARGE_ROWS, h, h))
    for width in (config.hidden_size, h * config.hidden_size, config.head_dim, config.q_lora_rank):
        yield f"norm {width}", (lambda x: mean_square_rsqrt(x, config.rms_norm_eps), noise(LARGE_ROWS, width))
    # As wide as the mixing logits, so that rows end inside of a vector.
    gates = noise(LARGE_ROWS, 2 * h + h * h)
    yield "gates", (lambda x: torch.addcdiv(x[0] * 0 + 1, x[0] * 0 + 2, sigmoid_inverse(x)), gates)
    yield "logits", (lambda x: torch.addcmul(x[0] * 0 + 1, x, x), gates)
    streams = noise(LARGE_ROWS, h, h + config.hidden_size)
    yield "stream mixing", (lambda x: torch.baddbmm(2 * x[:, :, h:], x[:, :, :h].mT, x[:, :, h:]), streams)
    yield "stream collapse", (lambda x: torch.bmm(x[:, :1, :h], x[:, :, h:]), streams)
    pooled = noise(LARGE_ROWS, 128, config.head_dim)
    yield "pooling", (lambda x: (torch.softmax(x, dim=1) * x).sum(1), pooled)


def _packed_products(config: V4Config, noise: Callable[..., torch.Tensor]) -> Iterator[tuple[str, Product]]:
    """What w8a8 runs beside its INT8 products, whose sums are exact: packed BF16 matrices, and FP32 ones."""
    dense, wide = _linears(config, BFLOAT16), torch.float32
    broad = {linear for linear in dense if linear[0] == wide} | {(wide, config.index_head_dim, config.index_head_dim)}
    packed = {linear[1:] for linear in dense} | {(config.group_columns, config.o_lora_rank)}
    for inputs, outputs in sorted(packed):
        weight = DenseWeight(noise(outputs, inputs, dtype=torch.bfloat16))
        rows = noise(LARGE_ROWS, inputs, dtype=torch.bfloat16)
        yield f"packed linear {inputs} -> {outputs}", (weight.product, rows)
    for dtype, inputs, outputs in sorted(broad, key=str):
        weight_OI = noise(outputs, inputs, dtype=dtype)
        yield f"linear {dtype} {inputs} -> {outputs}", (partial(_linear, weight_OI), noise(LARGE_ROWS, inputs))


def _linears(config: V4Config, mode: Numerics) -> set[tuple[torch.dtype, int, int]]:
    """(dtype, inputs, outputs) of every row_linear of the model."""
    c, act, wide = config, mode.activation, mode.accumulation
    H, h = c.hidden_size, c.hc_mult
    narrow = [
        (H, c.q_lora_rank),
        (c.q_lora_rank, c.num_attention_heads * c.head_dim),
        (H, c.head_dim),
        (c.q_lora_rank, c.index_n_heads * c.index_head_dim),
        (H, c.index_n_heads),
        (H, c.moe_intermediate_size),
        (c.moe_intermediate_size, H),
    ]
    broad = [
        (h * H, (2 + h) * h),
        (h * H, h),
        (H, 2 * c.head_dim),
        (H, c.head_dim),
        (H, 2 * c.index_head_dim),
        (H, c.n_routed_experts),
        (H, c.vocab_size),
    ]
    if c.dspark is not None:
        narrow.append((H * len(c.dspark.target_layer_ids), H))
        broad.append((c.dspark.markov_rank, c.vocab_size))
    if c.drafter == "mtp":
        narrow.append((H, H))
    linears = {(act, i, o) for i, o in narrow} | {(wide, i, o) for i, o in broad}
    return {(dtype, i, min(o, MOST_OUTPUTS)) for dtype, i, o in linears}


def _group_products(
    config: V4Config, mode: Numerics, noise: Callable[..., torch.Tensor]
) -> Iterator[tuple[str, Product]]:
    """Both halves of the output projection, for all groups and for one alone."""
    G, K, O, H = config.o_groups, config.group_columns, config.o_lora_rank, config.hidden_size
    for inputs, outputs, transposed in ((K, O, False), (O, H, True)):
        weights = noise(G, outputs, inputs, dtype=mode.activation)
        whole = weights.permute(1, 0, 2).contiguous().permute(1, 2, 0) if transposed else weights.transpose(1, 2)

        x_RGI = noise(LARGE_ROWS, G, inputs, dtype=mode.activation)
        name = f"group product {mode.activation} {inputs} -> {outputs}"
        yield name, (partial(_grouped, whole), x_RGI)
        # One group alone, as a rank that owns a single group runs it.
        x_GRI = x_RGI.transpose(0, 1)
        yield f"{name}, groups apart", (partial(_groups_apart, x_GRI, whole), torch.arange(G))


def _expert_products(
    config: V4Config, mode: Numerics, noise: Callable[..., torch.Tensor]
) -> Iterator[tuple[str, Product]]:
    """Segments of one expert in a batch of experts, against the same rows in a product of their own."""
    H, width = config.hidden_size, config.moe_intermediate_size
    for inputs, outputs in ((H, width), (width, H)):
        if inputs * outputs < SMALL_PRODUCT:
            continue
        outputs = min(outputs, MOST_OUTPUTS)
        for experts in EXPERT_BATCHES:
            weights = noise(experts, outputs, inputs, dtype=mode.activation)
            name = f"expert product {mode.activation} {inputs} -> {outputs}, batch of {experts}"
            yield name, (partial(_batched, weights), noise(LARGE_ROWS, inputs, dtype=mode.activation))


def _batched(weights_XOI: torch.Tensor, x_RI: torch.Tensor) -> torch.Tensor:
    """All rows through the last expert: a few in a batch whose other experts have rows too, many on their own."""
    if len(x_RI) == LARGE_ROWS:
        return row_linear(x_RI, weights_XOI[-1])
    padded_PI = F.pad(x_RI, (0, 0, 0, -len(x_RI) % ROW_MULTIPLE))
    others = [padded_PI * (2 + e) for e in range(len(weights_XOI) - 1)]
    return batched_linear(torch.stack([*others, padded_PI]), weights_XOI)[-1, : len(x_RI)]


def _linear(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return row_linear(x, weight)


def _grouped(weights_GIO: torch.Tensor, x_RGI: torch.Tensor) -> torch.Tensor:
    return tile_product(x_RGI.transpose(0, 1), weights_GIO).transpose(0, 1)


def _groups_apart(x_GRI: torch.Tensor, weights_GIO: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The group product as a function of which groups take part."""
    return tile_product(x_GRI[groups], weights_GIO[groups])


def _attention_products(config: V4Config, noise: Callable[..., torch.Tensor]) -> Iterator[tuple[str, Product]]:
    """Scores, softmax and values of a tile, its rows taken in other numbers."""
    shared = TILE + config.sliding_window
    for lanes in (shared, shared + MIN_WIDTH, shared + DENSE_LIMIT * config.index_topk, config.index_topk):
        keys = noise(1, lanes, config.head_dim)

        def scores(q: torch.Tensor, k: torch.Tensor = keys) -> torch.Tensor:
            return tile_product(q.flatten(0, 1)[None], k.transpose(1, 2)).view(*q.shape[:2], -1)

        def values(p: torch.Tensor, k: torch.Tensor = keys) -> torch.Tensor:
            return tile_product(torch.softmax(p, dim=2).flatten(0, 1)[None], k).view(*p.shape[:2], -1)

        heads = config.num_attention_heads
        yield f"tile scores {lanes} lanes", (scores, noise(LARGE_ROWS, heads, config.head_dim))
        yield f"tile values {lanes} lanes", (values, noise(LARGE_ROWS, heads, lanes))


def _block_products(config: V4Config, noise: Callable[..., torch.Tensor]) -> Iterator[tuple[str, Product]]:
    """Of a drafter: attention of whole blocks, taken in other numbers of blocks, and the sums of confidences. The one
    row of an MTP layer's block is the last of its own window."""
    if config.drafter == "none":
        return
    rows, D = 1 if config.dspark is None else config.dspark.block_size, config.head_dim
    lanes = config.sliding_window + (0 if config.dspark is None else rows)
    heads = rows * config.num_attention_heads
    keys_1LD = noise(1, lanes, D)

    def scores(q_BXD: torch.Tensor) -> torch.Tensor:
        return tile_product(q_BXD, keys_1LD.repeat(len(q_BXD), 1, 1).mT)

    def values(scores_BXL: torch.Tensor) -> torch.Tensor:
        probability_BXL = torch.softmax(F.pad(scores_BXL, (0, 1)), dim=2)[:, :, :lanes]
        return tile_product(probability_BXL, keys_1LD.repeat(len(scores_BXL), 1, 1))

    yield f"block scores {lanes} lanes", (scores, noise(LARGE_ROWS, heads, D))
    yield f"block values {lanes} lanes", (values, noise(LARGE_ROWS, heads, lanes))
    if config.dspark is None:
        return
    inputs = config.hidden_size + config.dspark.markov_rank
    weight = noise(inputs)
    yield f"confidence of {inputs} inputs", (lambda x: (x * weight).sum(1), noise(LARGE_ROWS, inputs))
