"""Whether ids that part were a tie: the two highest logits in FP64, behind what both runs have written.

Letters: V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..comm.agreement import agree, encode_control, share_control
from ..models.numerics import Numerics
from ..models.v4.model import Model
from ..parallel.groups import Groups
from .compare_runs import Comparison

STAGE = "ties"


def with_ties(
    comparison: Comparison | None, groups: Groups, mode: Numerics, load: Callable[[], Model]
) -> Comparison | None:
    """The comparison of greedy runs, its divergences with their `ulps`. All ranks call it; world rank 0 alone has a
    comparison.

    load: the same checkpoint in FP64, on all ranks; called only where ids parted. Nothing is told in w8a8, whose
    rounding FP64 does not have, and on NPUs, which do not have FP64.
    """
    told = mode.quantisation is None and not groups.device.startswith("npu")
    prefixes = [each.common for each in comparison.divergences] if comparison is not None and told else []
    message = encode_control({"prefixes": prefixes}) if prefixes else None
    length = agree([len(message or b"")], groups, stage=STAGE)[0][0]
    if not length:
        return comparison
    tops = _two_highest(share_control(message, length, groups, stage=STAGE)["prefixes"], load())
    if comparison is None:
        return None
    judged = [replace(each, ulps=ulps(*top, mode)) for each, top in zip(comparison.divergences, tops, strict=True)]
    return replace(comparison, divergences=tuple(judged))


def ulps(highest: float, second: float, mode: Numerics) -> float:
    """Their distance in units of the last place that the mode's activations have at `highest`."""
    place = math.floor(math.log2(abs(highest))) if highest else 0
    return (highest - second) / (torch.finfo(mode.activation).eps * 2.0**place)


@torch.inference_mode()
def _two_highest(prefixes: Sequence[Sequence[int]], model: Model) -> list[tuple[float, float]]:
    """By prefix, the two highest logits behind it; [] on ranks that own none."""
    found = []
    for prefix in prefixes:
        logits_1V = model.forward(model.plan_sequences([prefix], asked="last")).logits
        if logits_1V is not None and len(logits_1V):
            highest, second = logits_1V[0].topk(2).values.tolist()
            found.append((highest, second))
    return found
