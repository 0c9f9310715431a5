"""Working memory of a rank in its largest step: what its tensors hold at once, stage by stage. Pure arithmetic.

Letters: T local rows, G group rows, R routes that arrive, h streams, H hidden, N heads, D head dim, I expert width.
In INT8 a CPU's product takes its rows as two halves in FP32, and gives the sums of both before their difference:
`_halves` and `_sums` count that, with what it is scaled by.
"""

from dataclasses import dataclass

from ...parallel.topology import Topology
from ..checkpoint.forms import SCALE_BYTES
from ..numerics import Numerics
from .attention import attention_workspace
from .config import V4Config
from .sizing import worst_routes
from .traffic import PAYLOADS, Load, payload_columns


@dataclass(frozen=True)
class Buffers:
    """Bytes of the streams, which every stage needs beside its own, and of each stage at its worst."""

    streams: int
    stages: dict[str, int]

    @property
    def peak(self) -> int:
        return self.streams + max(self.stages.values())


def step_buffers(
    config: V4Config,
    topology: Topology,
    numerics: Numerics,
    load: Load,
    *,
    context: int,
    want_logits: bool = True,
    gather_weights: bool = False,
) -> Buffers:
    """Working memory of a step of this load whose requests have up to `context` positions.

    The experts' part is the worst case of the exchanges: every row of the EP block has all its routes on this rank.
    """
    T, h, H = load.local_t, config.hc_mult, config.hidden_size
    act, wide, stream = (d.itemsize for d in (numerics.activation, numerics.accumulation, numerics.stream))
    # A layer holds the streams that enter it until its end, beside the newer ones; the step its embedding and angles.
    streams = 2 * T * h * H * stream + T * H * (2 * act + 2 * wide) + 4 * T * config.qk_rope_head_dim * wide
    stages = {
        "hyper": 3 * T * h * H * wide,
        "gather": _gather(config, topology, numerics, T),
        "attend": _attend(config, numerics, load, context),
        "publish": _publish(config, topology, numerics, T, gather_weights),
        "experts": _experts(config, topology, numerics, load),
        "head": _head(config, topology, numerics, load, want_logits),
    }
    return Buffers(streams, stages)


def _halves(numerics: Numerics, inputs: int) -> int:
    """Bytes of one row's codes and halves in an INT8 product; none in others."""
    return inputs * (1 + 2 * numerics.accumulation.itemsize) if numerics.quantisation else 0


def _sums(numerics: Numerics, outputs: int) -> int:
    """Bytes of one row's result, and of what becomes of it, where the product may be in INT8."""
    wide, act = numerics.accumulation.itemsize, numerics.activation.itemsize
    return outputs * (3 * wide if numerics.quantisation else 2 * act)


def _queries(config: V4Config, rows: int) -> int:
    return rows * config.num_attention_heads * config.head_dim


def _gather(config: V4Config, topology: Topology, numerics: Numerics, T: int) -> int:
    """Queries in the making, or kept beside payloads packed, gathered and unpacked and the states that come of them."""
    act, wide = numerics.activation.itemsize, numerics.accumulation.itemsize
    making = _queries(config, T) * (2 * act + 2 * wide) + T * _halves(numerics, config.q_lora_rank)
    columns = max(sum(payload_columns(config, numerics, name) for name in PAYLOADS[kind]) for kind in set(config.kinds))
    payload = columns * numerics.wire.itemsize
    groups = topology.tp * T
    copies = 1 if topology.tp == 1 else 3
    pooled = 6 * groups * payload
    return max(making, _queries(config, T) * wide + (T + copies * groups) * payload + pooled)


def _attend(config: V4Config, numerics: Numerics, load: Load, context: int) -> int:
    """Queries, what attention works with, its output, and that turned back."""
    if not max(load.valid):
        return 0
    queries = 2 * _queries(config, load.local_t) * numerics.accumulation.itemsize
    if numerics.quantisation and 4 in config.compress_ratios:
        queries += load.local_t * config.index_n_heads * config.index_head_dim * numerics.accumulation.itemsize
    return queries + attention_workspace(config, numerics, load.local_t, context)


def _publish(config: V4Config, topology: Topology, numerics: Numerics, T: int, gather_weights: bool) -> int:
    """Heads before and after they travel, what the owners make of them, and partial sums before and after."""
    act, wide, tp = numerics.activation.itemsize, numerics.accumulation.itemsize, topology.tp
    own_groups = config.o_groups if gather_weights else config.o_groups // tp
    rows = T if gather_weights else tp * T
    heads = _queries(config, T) * (wide + act * (1 if tp == 1 or gather_weights else 3))
    latent = rows * own_groups * config.o_lora_rank * act
    partials = rows * own_groups * config.hidden_size * (act + wide * (wide != act))
    summed = 0 if tp == 1 or gather_weights else 3 * rows * config.hidden_size * wide
    if not numerics.quantisation:
        return heads + latent + partials + summed
    latent = rows * own_groups * (2 * wide * config.o_lora_rank + _halves(numerics, config.o_lora_rank))
    # What came from other ranks is packed again, in FP32 at most.
    packed = config.o_groups * config.o_lora_rank * (config.group_columns + config.hidden_size) * wide
    partials = rows * own_groups * _sums(numerics, config.hidden_size)
    return heads + latent + partials + summed + (packed if gather_weights and tp > 1 else 0)


def _experts(config: V4Config, topology: Topology, numerics: Numerics, load: Load) -> int:
    """Rows sent, rows that came, the experts' inner rows, results, and results back at their routes."""
    act, wide, H = numerics.activation.itemsize, numerics.accumulation.itemsize, config.hidden_size
    I = config.moe_intermediate_size
    R = worst_routes(config, topology, load.rows)
    sent = max(load.valid) * config.num_experts_per_tok
    row = (H + SCALE_BYTES if numerics.quantisation else H * act) + wide + 8
    arriving = sent * 2 * row + R * 2 * row
    working = R * (row + max(5 * I * wide, _halves(numerics, H) + 4 * I * wide))
    finishing = R * (row + 3 * I * wide + _halves(numerics, I) + _sums(numerics, H))
    returning = R * (row + 2 * H * act) + 3 * sent * H * act
    routing = max(load.valid) * config.n_routed_experts * (2 * wide + 16) + 8 * (R + sent) * 8
    return max(arriving, working, finishing, returning) + sent * row * (topology.ep > 1) + routing


def _head(config: V4Config, topology: Topology, numerics: Numerics, load: Load, want_logits: bool) -> int:
    """Logits of the asked rows on this rank's vocabulary, and the own ones whole where they are wanted."""
    wide = numerics.accumulation.itemsize
    asked = sum(load.asked)
    hidden = 2 * asked * config.hidden_size * (wide + numerics.activation.itemsize)
    own = asked * (config.vocab_size // topology.tp) * wide
    back = 2 * max(load.asked) * config.vocab_size * wide if want_logits and topology.tp > 1 else 0
    return hidden + own + back
