"""The exchanges that Flash makes in one step at a topology: names, sizes, calls. Pure arithmetic, no torch.

The sizes are those of the deployment point: 64 requests a tensor group, 8 verified rows each (one token and 7 drafts),
8,192 rows a group in prefill, INT8 rows with an FP32 scale to the experts, BF16 back, heads and keys in BF16, partial
sums and logits in FP32. Every exchange is one that the library makes; where the group is a rank alone there is none.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..comm.projection import sends_sums
from ..models.v4.config import V4Config
from ..parallel.ownership import even_band
from ..parallel.topology import Topology

REQUESTS, DRAFTS, PREFILL_ROWS = 64, 7, 8192
"""Requests and prefill rows of a tensor group; drafts of a request."""

RECORD_HEADER, RECORD_SLOT = 7, 5 + (1 + DRAFTS) + 2 * DRAFTS
"""Numbers of an agreement record: before the slots, and of each: five, then tokens, drafts and survivals."""

NAME_LANES = 12
"""Lanes of a context row's name: slot, generation and position in int64."""

PAYLOADS = {"swa": ("kv",), "hca": ("hca",), "csa": ("csa-aux", "csa-main")}
"""Kind of attention -> what its layers gather, in order."""

ITEMSIZE = {"bfloat16": 2, "float32": 4, "int64": 8, "int8": 1}


@dataclass(frozen=True)
class Planned:
    """One exchange of a step, as each rank of the group sees it.

    rows: an all-gather's own rows; an all-to-all's rows for each destination; the source rows of dispatch and combine.
    calls: how often a step makes it.
    """

    name: str
    op: str
    group: str
    rows: int
    columns: int
    dtype: str
    calls: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (of an expert's row: without scale, weight and route number)."""
        return self.columns * ITEMSIZE[self.dtype]


def exchanges(preset: str, config: V4Config, topology: Topology) -> tuple[Planned, ...]:
    """The exchanges of one step of decode, prefill or draft, in the order of their first call.

    ValueError for another preset, or where the topology does not fit the config.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}, allowed: {', '.join(PRESETS)}")
    topology.check_model(config.o_groups, config.vocab_size, config.n_routed_experts)
    sizes = {"tp": topology.tp, "ep": topology.ep, "world": topology.world}
    return tuple(planned for planned in PRESETS[preset](config, topology) if sizes[planned.group] > 1)


def _decode(config: V4Config, topology: Topology) -> Iterator[Planned]:
    requests = even_band(REQUESTS, topology.tp)
    rows = requests * (1 + DRAFTS)
    yield Planned("agreement", "control", "world", 1, RECORD_HEADER + RECORD_SLOT * requests, "int64", 1)
    yield from _gathers(config, rows, config.kinds)
    yield from _publish(config, topology, rows, config.num_hidden_layers)
    yield from _experts(config, rows, config.num_hidden_layers)
    yield from _head(config, topology, rows)


def _prefill(config: V4Config, topology: Topology) -> Iterator[Planned]:
    """The weights of the output projection travel, for so many rows outweigh them; a request asks for one row."""
    rows, requests = even_band(PREFILL_ROWS, topology.tp), even_band(REQUESTS, topology.tp)
    own = config.o_groups // topology.tp * config.o_lora_rank
    layers = config.num_hidden_layers
    yield Planned("agreement", "control", "world", 1, RECORD_HEADER + RECORD_SLOT * requests, "int64", 1)
    yield from _gathers(config, rows, config.kinds)
    yield Planned("weights wo_a", "all-gather", "tp", own, config.group_columns, "bfloat16", layers)
    yield Planned("weights wo_b", "all-gather", "tp", config.hidden_size, own, "int8", layers)
    yield from _experts(config, rows, layers)
    yield from _head(config, topology, requests)


def _draft(config: V4Config, topology: Topology) -> Iterator[Planned]:
    """Context rows of the whole step go to the group in one gather, all stages' keys and a name; then a slab of blocks
    runs through the stages, which are window layers that gather nothing."""
    stages = len(config.draft_ratios)
    requests = even_band(REQUESTS, topology.tp)
    rows, columns = requests * DRAFTS, stages * config.head_dim + NAME_LANES
    yield Planned("gather context rows", "all-gather", "tp", requests * (1 + DRAFTS), columns, "bfloat16", 1)
    # A block has room for a row more than it has where its ranks exchange heads.
    yield from _publish(config, topology, requests * (DRAFTS + 1), stages)
    yield from _experts(config, rows, stages)
    yield from _head(config, topology, rows)


def _gathers(config: V4Config, rows: int, kinds: tuple[str, ...]) -> Iterator[Planned]:
    """One call per layer of a kind. Widths are lanes of BF16, in which FP32 takes two."""
    key, main, index = config.head_dim, 2 * config.head_dim, 2 * config.index_head_dim
    lanes = {"kv": key, "hca": 2 * 2 * key + key, "csa-aux": 2 * 2 * index + key, "csa-main": 2 * 2 * main}
    for kind, payloads in PAYLOADS.items():
        for payload in payloads:
            name = f"gather {payload}"
            yield Planned(name, payload, "tp", rows, lanes[payload], "bfloat16", kinds.count(kind))


def _publish(config: V4Config, topology: Topology, rows: int, calls: int) -> Iterator[Planned]:
    """Heads to the owners of their output groups; FP32 partials back, one per rank where its groups are a branch."""
    own = config.o_groups // topology.tp
    partials = (1 if sends_sums(config.o_groups, topology.tp) else own) * config.hidden_size
    yield Planned("publish heads", "all-to-all", "tp", rows, own * config.group_columns, "bfloat16", calls)
    yield Planned("reduce partials", "all-to-all", "tp", rows, partials, "float32", calls)


def _experts(config: V4Config, rows: int, calls: int) -> Iterator[Planned]:
    yield Planned("dispatch", "dispatch", "ep", rows, config.hidden_size, "int8", calls)
    yield Planned("combine", "combine", "ep", rows, config.hidden_size, "bfloat16", calls)


def _head(config: V4Config, topology: Topology, asked: int) -> Iterator[Planned]:
    """Asked rows to all vocabulary shards, and their logits back."""
    yield Planned("gather asked", "all-gather", "tp", asked, config.hidden_size, "bfloat16", 1)
    yield Planned("logits", "all-to-all", "tp", asked, config.vocab_size // topology.tp, "float32", 1)


PRESETS = {"decode": _decode, "prefill": _prefill, "draft": _draft}
"""Name -> what one step of it exchanges."""
