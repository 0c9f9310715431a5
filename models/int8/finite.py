"""The check that no activation of a step was NaN or infinite: their rows' scales tell."""

from collections.abc import Sequence

import torch


class NonFiniteActivation(RuntimeError):
    """A row that was to be quantised held NaN or infinity."""


def require_finite(scales: Sequence[tuple[int | str, str, torch.Tensor]]) -> None:
    """Raises NonFiniteActivation naming layer, stage and row of the first scale, in their order, that is not finite.

    scales: (layer, or the name of what has none; stage; the scale of QuantisedRows, whose first dim is rows), all on
    one device. One pass over all.
    """
    if not scales or bool(torch.cat([scale.flatten() for _, _, scale in scales]).isfinite().all()):
        return
    for layer, stage, scale in scales:
        bad = (~scale.isfinite()).nonzero()
        if len(bad):
            where = layer if isinstance(layer, str) else f"layer {layer}"
            raise NonFiniteActivation(f"{where}, stage {stage}, row {int(bad[0, 0])}: NaN or infinity in a row")
