"""How much memory the caches of a rank may take."""

from dataclasses import replace
from typing import Any

import torch

from ..comm.collectives import all_gather_rows
from ..parallel.groups import Groups
from .engine_flags import GIB, EngineFlags

LEFT_FOR_STEPS = 0.2
"""Of a device's free memory, what steps and libraries keep."""


def with_budget(flags: EngineFlags, groups: Groups) -> EngineFlags:
    """The flags with the caches' budget that holds on all ranks; every rank calls it, with its weights loaded.

    Devices give what they have left, the least of all ranks; on the CPU, whose memory others use too, there is a
    budget only where --cache-gib says so.
    """
    if flags.cache_gib is not None or groups.device == "cpu":
        return flags
    free, _ = torch.accelerator.get_memory_info(groups.device)
    own = torch.tensor([[free]], dtype=torch.int64)
    least = int(all_gather_rows(own, groups.control, stage="cache budget").min())
    return replace(flags, cache_gib=least * (1 - LEFT_FOR_STEPS) / GIB)


def engine_arguments(flags: EngineFlags, groups: Groups) -> dict[str, Any]:
    """Keywords of Engine but for `requests` and `max_context`. All ranks call it."""
    return with_budget(flags, groups).arguments()
