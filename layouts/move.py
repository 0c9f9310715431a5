"""Moving a plan's index tensors to the device that the model runs on."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def to_device(tree: Any, device: torch.device) -> Any:
    """A copy of nested frozen dataclasses, tuples and mappings in which every tensor is on `device`.

    Objects that hold no tensors of their own (requests, numbers, names) are shared.
    """
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, tuple):
        return tuple(to_device(part, device) for part in tree)
    if isinstance(tree, Mapping):
        return {name: to_device(part, device) for name, part in tree.items()}
    if is_dataclass(tree) and not isinstance(tree, type):
        moved = {f.name: to_device(getattr(tree, f.name), device) for f in fields(tree)}
        return type(tree)(**moved)
    return tree
