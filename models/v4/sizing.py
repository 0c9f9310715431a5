"""How much memory weights and caches of a rank need. Pure arithmetic, nothing is allocated."""

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from ...parallel.topology import Topology
from ..checkpoint.inventory import part_of
from ..checkpoint.names import TensorSpec, held_table
from ..checkpoint.share import held_slices, tensor_bytes
from ..numerics import Numerics
from .config import V4Config
from .pools import DRAFT_FAMILY, engine_shape, pool_shapes

POOLS = ("window_kv", "csa_kv", "csa_index", "hca_kv", "csa_state", "index_state", "hca_state", DRAFT_FAMILY)
"""Every pool of a plan; those that a model lacks have no bytes."""

MOST_REQUESTS = 1 << 20
"""No more requests of a group are counted."""


@dataclass(frozen=True)
class Held:
    """One key of a rank's weights: `count` tensors of `shape`, the first of which is `spec`; bytes of them all, and
    of their channel scales under a key of their own."""

    spec: TensorSpec
    count: int
    shape: tuple[int, ...]
    num_bytes: int


def held_weights(
    config: V4Config, topology: Topology, numerics: Numerics, *, rank: int = 0, draft: bool = False
) -> dict[str, Held]:
    """What a rank holds under each key of its weights; with draft also of mtp.*."""
    held = {}
    share = config.n_routed_experts // topology.ep
    for name, spec in _keys(config, draft):
        stacked = spec.shard == "experts"
        slices = None if stacked else held_slices(spec, config, topology, rank)
        shape = spec.shape if slices is None else tuple(s.stop - s.start for s in slices)
        count = share if stacked else 1
        held[name] = Held(spec, count, shape, count * tensor_bytes(spec, shape, numerics))
    return held


@lru_cache(maxsize=8)
def _keys(config: V4Config, draft: bool) -> tuple[tuple[str, TensorSpec], ...]:
    """Every key of a model's weights with its first spec; the experts of a stack are alike."""
    return tuple((name, specs[0]) for name, specs in held_table(config, draft=draft).items())


def weight_parts(
    config: V4Config, topology: Topology, numerics: Numerics, *, rank: int = 0, draft: bool = False
) -> dict[str, int]:
    """Bytes of a rank's weights by part of the model."""
    parts: dict[str, int] = {}
    for each in held_weights(config, topology, numerics, rank=rank, draft=draft).values():
        part = part_of(each.spec)
        parts[part] = parts.get(part, 0) + each.num_bytes
    return parts


@dataclass(frozen=True)
class Pool:
    """One pool of a plan. page_bytes: one page over all layers."""

    pages: int
    page_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.pages * self.page_bytes


@dataclass(frozen=True)
class CacheWish:
    """What an engine's caches shall hold, per tensor group, as `engine_shape` takes it.

    gamma: drafts of a request; where there are any, the context rows of all of the config's stages are kept.
    """

    requests: int
    max_context: int
    prefill_rows: int
    verify_rows: int = 1
    block_size: int = 32
    cache_bytes: int | None = None
    prefix_points: int = 0
    gamma: int = 0


def plan_pools(config: V4Config, numerics: Numerics, wish: CacheWish) -> dict[str, Pool]:
    """Every pool of POOLS as an engine allocates it. ValueError where cache_bytes do not hold one whole request."""
    given = {f.name: getattr(wish, f.name) for f in fields(wish) if f.name != "gamma"}
    given["draft_stages"] = len(config.draft_ratios) if wish.gamma else 0
    pools = {name: Pool(0, 0) for name in POOLS}
    for name, found in pool_shapes(config, engine_shape(config, numerics, **given), numerics).items():
        pools[name] = Pool(found.pages, found.page_bytes)
    return pools


def fitting_requests(config: V4Config, numerics: Numerics, wish: CacheWish, room: int) -> int:
    """How many requests of wish.max_context positions a group's caches hold in `room` bytes, 0 for none."""

    def fits(requests: int) -> bool:
        pools = plan_pools(config, numerics, replace(wish, requests=requests, cache_bytes=None))
        return sum(pool.num_bytes for pool in pools.values()) <= room

    low, high = 0, 1
    while high <= MOST_REQUESTS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def worst_routes(config: V4Config, topology: Topology, group_rows: int) -> int:
    """Routes that arrive at one rank where every row of its EP block has all its routes on that rank's experts."""
    local = config.n_routed_experts // topology.ep
    return topology.ep // topology.tp * group_rows * min(config.num_experts_per_tok, local)
