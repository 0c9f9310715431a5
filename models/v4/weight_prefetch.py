"""The output projection's weights on their way, one layer ahead of the layer that computes."""

from collections.abc import Sequence

import torch

from ...comm.projection import PendingShards, Shards, start_gather_weight_shards
from ...parallel.groups import Group

BUFFERS = 2
"""One that a layer computes with, one that the next layer's weights arrive in."""

STAGE = "weight_gather"


class WeightPrefetch:
    """Brings every layer's weight shards to every rank of a group, in layer order, into two buffers used in turn.

    layers: (wo_a [P * Ro, K], wo_b [H, P * Ro]) of this rank by layer, of one shape and dtype each; kept, not copied,
    and constant while a step runs. The buffers are made here, once: 2 * size * (bytes of one layer's shards).
    """

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], group: Group) -> None:
        self._layers, self._group = tuple(layers), group
        self._buffers = tuple(
            tuple(w.new_empty(group.size * w.shape[0], w.shape[1]) for w in self._layers[0]) for _ in range(BUFFERS)
        )
        self._next = 0
        self._pending: PendingShards | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for pair in self._buffers for buffer in pair)

    def begin(self) -> None:
        """Start the first layer's weights. All ranks of the group call it at the start of a step."""
        if self._pending is not None:
            # A step that ended early, on all ranks alike, left a gather under way; its buffer is not free before.
            self._wait()
        self._start(0)

    def take(self, layer: int) -> Shards:
        """The shards of every rank for this layer, by owner, and the next layer's are on their way.

        They hold until `take` of the layer after the next one. Layers come in order.
        """
        assert self._pending is not None and layer == self._next, f"layer {layer} is not on its way"
        shards = self._wait()
        if layer + 1 < len(self._layers):
            self._start(layer + 1)
        return shards

    def _start(self, layer: int) -> None:
        a, b = self._buffers[layer % BUFFERS]
        wo_a, wo_b = self._layers[layer]
        self._pending = start_gather_weight_shards(wo_a, wo_b, self._group, buffers=(a, b), stage=STAGE)
        self._next = layer

    def _wait(self) -> Shards:
        pending, self._pending = self._pending, None
        assert pending is not None
        return pending.wait()

    def drop(self) -> None:
        """After an error in a step: give up what keeps connections alive if the groups have failed."""
        if self._pending is not None and self._group.health.failure is not None:
            self._pending.drop()
            self._pending = None
