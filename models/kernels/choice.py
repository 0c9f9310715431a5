"""Which kernels a model uses: those that are found to give the plain form's bits here, at the model's own shapes.

So a rank with kernels and one without have equal bits, wherever the row-independence self-check holds.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch

from ...layouts.bits import same_bits
from ...layouts.tiles import DENSE_LIMIT, MIN_WIDTH, TILE
from ...parallel.groups import Groups
from ..functions import mean_square_rsqrt, rms_norm, row_linear, tile_product
from ..moe.scores import SUM_FLOOR
from ..numerics import FLOAT32, Numerics
from ..v4.config import V4Config
from ..v4.hyper import HyperWeights, hc_post, hc_pre
from ..v4.moe import HashRouter, LearnedRouter
from ..v4.rope import rotate
from .calls import Kernels
from .experts import route
from .library import LANES, MOST_COLUMNS, MOST_INPUTS, MOST_STREAMS, load

ROWS = (1, 4, 7, 32)
"""Row counts at which kernels are compared with the plain form."""


def choose_kernels(config: V4Config, numerics: Numerics, groups: Groups) -> Kernels | None:
    """The kernels for one rank's share of a model; None on devices, without FP32 streams, or where none are built.

    Numerics that have BF16 in their products share those of the streams, of state rows and of cache writes.
    """
    if groups.device != "cpu" or numerics.stream != torch.float32 or numerics.accumulation != torch.float32:
        return None
    processor = f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    if numerics != FLOAT32:
        return _proven_streams(config, processor)
    return _proven(config, groups.topology.tp, processor)


@lru_cache
def _proven_streams(config: V4Config, processor: str) -> Kernels | None:
    library = load()
    if library is None or not library.ms_fused() or config.hc_mult > MOST_STREAMS:
        return None
    with torch.inference_mode():
        everything = Kernels(library)
        proven = _equal_hyper(everything, config, torch.Generator().manual_seed(1))
    return Kernels(library, norms=False, hyper=True) if proven else None


@lru_cache
def _proven(config: V4Config, tp: int, processor: str) -> Kernels | None:
    library = load()
    if library is None or not library.ms_fused():
        return None
    generator = torch.Generator().manual_seed(1)
    everything = Kernels(library)
    with torch.inference_mode():
        shapes = {shape for shape in _matrices(config, tp) if shape[0] <= MOST_INPUTS and shape[1] >= LANES}
        return Kernels(
            library,
            norms=_equal_norms(everything, config, generator),
            hyper=config.hc_mult <= MOST_STREAMS and _equal_hyper(everything, config, generator),
            products=frozenset(shape for shape in sorted(shapes) if _equal_product(everything, *shape, generator)),
            routes=_equal_routes(everything, config, generator),
            lanes=frozenset(lanes for lanes in _lanes(config) if _equal_lanes(everything, config, lanes, generator)),
        )


def _matrices(config: V4Config, tp: int) -> set[tuple[int, int]]:
    """(inputs, outputs) of every matrix of the model."""
    c, H = config, config.hidden_size
    pooled = {c.head_dim, 2 * c.head_dim, 2 * c.index_head_dim}
    drafter = set()
    if c.dspark is not None:
        drafter = {(len(c.dspark.target_layer_ids) * H, H), (c.dspark.markov_rank, c.vocab_size)}
    return {
        *drafter,
        *((H, columns) for columns in pooled),
        (H, c.q_lora_rank),
        (c.q_lora_rank, c.num_attention_heads * c.head_dim),
        (c.q_lora_rank, c.index_n_heads * c.index_head_dim),
        (H, c.index_n_heads),
        (H, c.n_routed_experts),
        (H, c.moe_intermediate_size),
        (c.moe_intermediate_size, H),
        (c.group_columns, c.o_lora_rank),
        (c.o_lora_rank, H),
        (H, c.vocab_size // tp),
    }


def _lanes(config: V4Config) -> Iterator[int]:
    """Numbers of lanes that tiles mix: the window's alone, and with compressed entries."""
    shared, width = TILE + config.sliding_window, MIN_WIDTH
    yield shared
    while shared + width <= MOST_INPUTS and width <= max(DENSE_LIMIT * config.index_topk, MIN_WIDTH):
        yield shared + width
        width *= 2


def _equal_norms(kernels: Kernels, config: V4Config, generator: torch.Generator) -> bool:
    widths = {config.hidden_size, config.q_lora_rank, config.head_dim, config.index_head_dim}
    for width in sorted(widths):
        for rows in ROWS:
            x, cos, sin = torch.randn(3, rows, width, generator=generator)
            gain, eps = torch.randn(width, generator=generator), config.rms_norm_eps
            normed = rms_norm(x, gain, eps, x.dtype)
            equal = same_bits(kernels.norm_turn(x, gain, eps, None), normed)
            if width % 2 == 0:
                plain = rotate(x * mean_square_rsqrt(x, eps), cos, sin)
                equal = equal and same_bits(kernels.norm_turn(x, None, eps, (cos, sin)), plain)
            if not equal:
                return False
    return config.head_dim % 2 == 0


def _equal_hyper(kernels: Kernels, config: V4Config, generator: torch.Generator) -> bool:
    h, H = config.hc_mult, config.hidden_size
    fn, base = torch.randn((2 + h) * h, h * H, generator=generator), torch.randn((2 + h) * h, generator=generator)
    weights = HyperWeights(fn / (h * H) ** 0.5, base, torch.randn(3, generator=generator))
    for rows in ROWS:
        streams_ThH, y_TH = torch.randn(rows, h, H, generator=generator), torch.randn(rows, H, generator=generator)
        plain, own = (hc_pre(streams_ThH, weights, config, y_TH.dtype, form) for form in (None, kernels))
        after, ours = (hc_post(y_TH, streams_ThH, *own[1:], form) for form in (None, kernels))
        if not all(same_bits(a, b) for a, b in zip((*plain, after), (*own, ours), strict=True)):
            return False
    return True


def _equal_routes(kernels: Kernels, config: V4Config, generator: torch.Generator) -> bool:
    E, H, k, factor = (
        config.n_routed_experts,
        config.hidden_size,
        config.num_experts_per_tok,
        config.routed_scaling_factor,
    )
    if E < LANES or H > MOST_INPUTS:
        return False
    gate, bias = torch.randn(E, H, generator=generator), torch.randn(E, generator=generator)
    table = torch.randint(E, (ROWS[-1], k), generator=generator)
    for rows in ROWS:
        x_TH, tokens = torch.randn(rows, H, generator=generator), torch.arange(rows)
        for router in (LearnedRouter(gate, bias, k, factor), HashRouter(gate, table, factor)):
            own = route(kernels, x_TH, gate, *router.chosen(tokens), SUM_FLOOR, factor)
            plain = router.forward(x_TH, tokens)
            if not all(same_bits(a, b) for a, b in zip(own, plain, strict=True)):
                return False
    return True


def _equal_product(kernels: Kernels, inputs: int, outputs: int, generator: torch.Generator) -> bool:
    weight_OI = torch.randn(outputs, inputs, generator=generator)
    for rows in ROWS:
        x_TI = torch.randn(rows, inputs, generator=generator)
        if not same_bits(kernels.product(x_TI, weight_OI), row_linear(x_TI, weight_OI)):
            return False
    return True


def _equal_lanes(kernels: Kernels, config: V4Config, lanes: int, generator: torch.Generator) -> bool:
    """Whether attention's two products over so many lanes are what the kernels' chains give."""
    A, D = config.num_attention_heads, config.head_dim
    if D % LANES or D > MOST_COLUMNS or D > MOST_INPUTS:
        return False
    for tiles, rows in ((1, 1), (3, 1), (2, 16)):
        keys_NLD = torch.randn(tiles, lanes, D, generator=generator)
        q_NMD = torch.randn(tiles, rows * A, D, generator=generator)
        p_NML = torch.rand(tiles, rows * A, lanes, generator=generator)
        scores_NML, values_NMD = tile_product(q_NMD, keys_NLD.mT), tile_product(p_NML, keys_NLD)
        for n in range(tiles):
            scores = kernels.product(q_NMD[n], keys_NLD[n])
            values = kernels.product(p_NML[n], keys_NLD[n].mT.contiguous())
            if not (same_bits(scores, scores_NML[n]) and same_bits(values, values_NMD[n])):
                return False
    return True
