"""The paged pool of context rows, replicated over a tensor group, and how accepted rows come into it.

Letters: M stages, T rows of this rank, G rows of the group, S pool slots, D head dim, Q request slots.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ...comm.context_gather import gather_context
from ...comm.experts import index_tensor
from ...layouts.pages import PageTable
from ...layouts.payloads import Payload, Span
from ..numerics import Numerics
from ..v4.caches import Caches
from ..v4.config import V4Config
from ..v4.integrity import check_unique
from ..v4.pools import DRAFT_FAMILY
from .drafter import Net

NAME_COLUMNS = 3
"""Of a row that travels: request slot, generation, position."""


@dataclass(frozen=True)
class DraftPool:
    """keys_MSD of all stages behind one table. generation_Q int64: the stamp of each request slot's present request;
    context_Q int64: behind the last position that each has context rows of."""

    keys_MSD: torch.Tensor
    table: PageTable
    generation_Q: np.ndarray
    context_Q: np.ndarray


def draft_pool(caches: Caches) -> DraftPool:
    """The caches' pool of context rows, in the same memory. ValueError where they have none."""
    if not caches.shape.draft_stages:
        raise ValueError("draft_stages of the caches is 0, allowed: that of the drafter")
    return DraftPool(caches.pools[DRAFT_FAMILY], caches.tables[DRAFT_FAMILY], caches.generation_Q, caches.context_Q)


def draft_payload(config: V4Config, numerics: Numerics) -> Payload:
    """What travels of a context row: its key row for each stage, and its name in bits."""
    keys = Span("kv", len(config.draft_ratios) * config.head_dim, numerics.kv)
    return Payload("draft_context", (keys, Span("name", NAME_COLUMNS, torch.int64)), numerics.wire)


def name_rows(
    slot_T: np.ndarray, generation_T: np.ndarray, position_T: np.ndarray, kept_T: np.ndarray | None = None
) -> torch.Tensor:
    """Names int64 [T, 3] of a rank's rows. Position -1, which nobody writes, where a row is not kept (rejected, or
    padding of the band)."""
    position_T = position_T if kept_T is None else np.where(kept_T, position_T, -1)
    return torch.from_numpy(np.stack((slot_T, generation_T, position_T), axis=1).astype(np.int64))


def write_context(keys_MTD: torch.Tensor, name_T3: torch.Tensor, pool: DraftPool, drafter: Net) -> None:
    """Bring the context rows of all ranks of the group into this rank's pool. Mutates keys_MSD and context_Q; one
    exchange. It comes between the target's forward, whose rows have their pages (`Caches.extend`), and
    `Caches.commit`, which publishes what is written here.

    T is equal on all ranks. Rows at position -1, and rows of a generation that is gone, leave no trace. RuntimeError
    where a row has no page, or two rows would go to one place.
    """
    stages, dim = drafter.stages, drafter.config.head_dim
    sent = {"kv": keys_MTD.transpose(0, 1).reshape(-1, stages * dim), "name": name_T3.to(keys_MTD.device)}
    payload = draft_payload(drafter.config, drafter.numerics)
    with drafter.clock("draft_gather"):
        got = gather_context(sent, payload, drafter.groups.tp, stage="draft_gather")
    name_G3 = got["name"].cpu().numpy()
    source, target = _places(name_G3, pool)
    if not len(source):
        return
    device = keys_MTD.device
    rows_MGD = got["kv"].index_select(0, index_tensor(source, device)).view(-1, stages, dim).transpose(0, 1)
    pool.keys_MSD.index_copy_(1, index_tensor(target, device), rows_MGD.to(pool.keys_MSD.dtype))
    slot, _, position = name_G3[source].T
    np.maximum.at(pool.context_Q, slot, position + 1)


def _places(name_G3: np.ndarray, pool: DraftPool) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the group that are written, and the pool slot of each."""
    slot_G, generation_G, position_G = name_G3.T
    kept_G = position_G >= 0
    source = np.flatnonzero(kept_G & (pool.generation_Q[np.where(kept_G, slot_G, 0)] == generation_G))
    slot, position = slot_G[source], position_G[source]
    target = pool.table.host_slots(slot, position)
    if target.min(initial=0) < 0:
        bad = int(target.argmin())
        raise RuntimeError(
            f"{DRAFT_FAMILY}: position {position[bad]} of request slot {slot[bad]} has no page to be written to"
        )
    check_unique({DRAFT_FAMILY: (torch.from_numpy(source), torch.from_numpy(target))})
    return source, target
