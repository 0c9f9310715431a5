"""What must hold of the pages of caches at any time."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch

from ...layouts.page_pool import PagePool
from ...layouts.pages import Tables
from ...layouts.prefix import PrefixIndex


def check_pages(tables: Tables, pools: Mapping[str, PagePool], prefixes: PrefixIndex) -> None:
    """Each page is free or has as many references as holders, tables and published prefixes counted; no request
    slot has a page twice. RuntimeError names the family and the first page that is wrong."""
    for name, pages in pools.items():
        held: Counter[int] = Counter()
        for slot, row in enumerate(tables[name].table.tolist()):
            mapped = [page for page in row if page >= 0]
            if len(set(mapped)) < len(mapped):
                raise RuntimeError(f"{name}: request slot {slot} has a page twice")
            held.update(mapped)
        for point in prefixes.points.values():
            held.update((*point.entries.get(name, ()), *(point.state or {}).get(name, ())))
        free = Counter(pages.free)
        for page in range(pages.count):
            if held[page] != pages.references[page] or free[page] != (held[page] == 0):
                raise RuntimeError(
                    f"{name}: page {page} has {held[page]} holders, {pages.references[page]} references, "
                    f"and is {'' if free[page] else 'not '}free"
                )


def check_unique(writes: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """RuntimeError naming the family where two rows of a step would go to one pool slot; for a plan on the host."""
    for name, (_, target) in writes.items():
        ordered = np.sort(target.numpy())
        if (ordered[1:] == ordered[:-1]).any():
            raise RuntimeError(f"{name}: two rows of the step would be written to one slot")
