"""How large the caches are, as pure arithmetic: for the caches themselves and for the plan of memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from ...layouts.pages import COMPRESSED_TOKENS, PageFamily, page_families
from ..numerics import Numerics
from .config import V4Config

DRAFT_FAMILY = "draft_kv"
"""The family whose rows no layer of the target writes: a drafter does, after a step's rows are accepted."""


@dataclass(frozen=True)
class CacheShape:
    """What fixes the size of a rank's caches.

    request_slots: requests of the group at once; max_context: positions of one request; max_fresh: rows of one
    request in one step; block_size: positions of a window page. pages: physical pages per family, by default
    enough for every slot at full length. prefix_points: published prefixes from which a request can start, 0 for
    none; they live in pages that no request needs. draft_stages: those of the drafter whose context rows are kept
    too, 0 for none.
    """

    request_slots: int
    max_context: int
    max_fresh: int
    block_size: int = 32
    pages: Mapping[str, int] | None = None
    prefix_points: int = 0
    draft_stages: int = 0


@dataclass(frozen=True)
class PoolShape:
    """One pool: [layers (or stages), pages * page, columns] of dtype. depth: entries of a request's table."""

    layers: int
    pages: int
    page: int
    columns: int
    dtype: torch.dtype
    depth: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.layers, self.pages * self.page, self.columns

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers that have it."""
        return self.layers * self.page * self.columns * self.dtype.itemsize


def engine_shape(
    config: V4Config,
    numerics: Numerics,
    *,
    requests: int,
    max_context: int,
    prefill_rows: int,
    verify_rows: int = 1,
    block_size: int = 32,
    cache_bytes: int | None = None,
    prefix_points: int = 0,
    draft_stages: int = 0,
) -> CacheShape:
    """The caches of an engine of `requests` slots per group whose steps hold verify_rows rows of each and
    prefill_rows rows of prompts.

    Rings hold what all slots keep between two steps and the rows of one step; compressed families what is left of
    cache_bytes, without a limit one max_context for every slot. Prefixes that requests may start from have rings of
    their own. ValueError where cache_bytes do not hold one request of max_context.
    """
    fresh = max(prefill_rows, verify_rows)
    shape = CacheShape(requests, max_context, fresh, block_size, prefix_points=prefix_points, draft_stages=draft_stages)
    families = cache_families(config, shape)
    pages, blocks = {}, -(-max_context // COMPRESSED_TOKENS)
    for family in families:
        if family.per_entry:
            pages[family.name] = blocks
            continue
        pages[family.name] = ring_pages(family, requests, max_context, prefill_rows, verify_rows, fresh, prefix_points)
    one = pool_shapes(config, replace(shape, pages=pages), numerics)
    fixed = sum(one[family.name].nbytes for family in families if not family.per_entry)
    block_bytes = sum(one[family.name].page_bytes for family in families if family.per_entry)
    most = requests * blocks
    if cache_bytes is not None and block_bytes:
        room = (cache_bytes - fixed) // block_bytes
        most = room if prefix_points else min(room, most)
    if cache_bytes is not None and (fixed > cache_bytes or most < blocks):
        raise ValueError(
            f"the cache budget is {cache_bytes:,} bytes, allowed: {fixed + blocks * block_bytes:,} or more, which "
            f"{requests} requests and one context of {max_context:,} positions take"
        )
    pages.update({family.name: most for family in families if family.per_entry})
    return replace(shape, pages=pages)


def draft_family(config: V4Config, block_size: int = 32) -> PageFamily:
    """The pages of a drafter's context rows. One row more of history than the target's window has: the anchor of a
    block is a fresh row beside a whole window, not the last row of one. Block rows never come into pages."""
    return PageFamily(DRAFT_FAMILY, None, block_size, config.sliding_window + 1)


def cache_families(config: V4Config, shape: CacheShape) -> tuple[PageFamily, ...]:
    """The families of caches of this shape: those of the layers, then that of the drafter where there is one.

    ValueError where draft_stages are not the config's.
    """
    families = page_families(config.sliding_window, config.compress_ratios, shape.block_size)
    if not shape.draft_stages:
        return families
    if shape.draft_stages != len(config.draft_ratios):
        raise ValueError(
            f"draft_stages is {shape.draft_stages}, allowed: 0, or {len(config.draft_ratios)} as the model has"
        )
    return (*families, draft_family(config, shape.block_size))


def ring_pages(
    family: PageFamily,
    requests: int,
    max_context: int,
    prefill_rows: int,
    verify_rows: int,
    max_fresh: int,
    prefix_points: int,
) -> int:
    """Pages of a ring family's pool: what all slots keep between two steps, the rows of one step, and the points."""
    step = requests * -(-verify_rows // family.page) + -(-prefill_rows // family.page)
    at_work = min(requests * family.depth(max_context, max_fresh), requests * family.resting(max_context) + step)
    return at_work + prefix_points * point_pages(family)


def point_pages(family: PageFamily) -> int:
    """Pages of a ring family that a sequence starting at a multiple of 128 reads."""
    span = family.readable(1 << 20)
    return -(-span.stop // family.page) - span.start // family.page if span else 0


def row_form(family: PageFamily, config: V4Config, numerics: Numerics) -> tuple[int, torch.dtype]:
    """Columns and dtype of one cache row of this family. Quantised index rows are codes and the bytes of a scale."""
    columns = {
        "csa_index": config.index_head_dim,
        "csa_state": 4 * config.head_dim,
        "index_state": 4 * config.index_head_dim,
        "hca_state": 2 * config.head_dim,
    }.get(family.name, config.head_dim)
    if family.name == "csa_index" and numerics.quantisation is not None:
        return columns + torch.float32.itemsize, torch.int8
    return columns, numerics.accumulation if family.name.endswith("state") else numerics.kv


def family_layers(family: PageFamily, config: V4Config) -> tuple[int, ...]:
    """The layers that have rows of this family, ascending; of the drafter's its stages, from 0."""
    if family.name == DRAFT_FAMILY:
        return tuple(range(len(config.draft_ratios)))
    return tuple(range(config.num_hidden_layers)) if family.ratio is None else config.layers_of(family.ratio)


def pool_shapes(config: V4Config, shape: CacheShape, numerics: Numerics) -> dict[str, PoolShape]:
    """Every pool of one rank by family name, in the order of `cache_families`."""
    pools = {}
    for family in cache_families(config, shape):
        depth = family.depth(shape.max_context, shape.max_fresh)
        columns, dtype = row_form(family, config, numerics)
        pools[family.name] = PoolShape(
            layers=len(family_layers(family, config)),
            pages=(shape.pages or {}).get(family.name, shape.request_slots * depth),
            page=family.page,
            columns=columns,
            dtype=dtype,
            depth=depth,
        )
    return pools
