"""The context gather: one payload row per token, from every rank of the context group to every rank."""

from collections.abc import Mapping

import torch

from ..layouts.payloads import Payload
from ..parallel.groups import Group
from .collectives import all_gather_rows


def gather_context(
    tensors: Mapping[str, torch.Tensor], payload: Payload, group: Group, *, stage: str
) -> dict[str, torch.Tensor]:
    """Every span of the group's rows, [T, columns] -> [size * T, columns]: by source rank, then by row.

    One exchange, bit for bit; T is equal on all ranks. A group of one gets its own tensors back, never packed.
    """
    if group.size == 1:
        return dict(tensors)
    for name, tensor in tensors.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"span {name} of stage {stage} needs a gradient, which a context gather does not carry")
    rows_TL = payload.pack(tensors)
    return payload.unpack(all_gather_rows(rows_TL, group, stage=stage))
