"""Payloads: what one row of a context exchange consists of, as named column spans in lanes of one wire dtype."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .bits import as_lanes, from_lanes, raw_view

KINDS = ("kv", "hca", "csa_main", "csa_aux")


@dataclass(frozen=True)
class Span:
    """Some columns of one dtype under one name."""

    name: str
    columns: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Payload:
    """Spans side by side in one row of `wire` lanes, in order, without gaps."""

    kind: str
    spans: tuple[Span, ...]
    wire: torch.dtype

    def __post_init__(self) -> None:
        names = [span.name for span in self.spans]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"spans of payload {self.kind} are {names}, allowed: at least one, each name once")
        for span in self.spans:
            if span.columns < 1 or (span.columns * span.dtype.itemsize) % self.wire.itemsize:
                raise ValueError(
                    f"span {span.name} of payload {self.kind} has {span.columns} columns of {span.dtype}, "
                    f"allowed: a whole number of {self.wire} lanes from 1"
                )

    @property
    def width(self) -> int:
        """Lanes of a row."""
        return sum(self.lanes(span) for span in self.spans)

    def lanes(self, span: Span) -> int:
        """Lanes of one span."""
        return span.columns * span.dtype.itemsize // self.wire.itemsize

    def span(self, name: str) -> slice:
        """The lanes of the span with this name."""
        first = 0
        for span in self.spans:
            if span.name == name:
                return slice(first, first + self.lanes(span))
            first += self.lanes(span)
        raise ValueError(f"payload {self.kind} has no span {name!r}, allowed: {[s.name for s in self.spans]}")

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One tensor [T, columns] per span, in any layout -> [T, width] of the wire dtype, bit for bit."""
        rows = self._check(tensors)
        if len(self.spans) == 1:
            return as_lanes(tensors[self.spans[0].name], self.wire)
        first = tensors[self.spans[0].name]
        out = torch.empty((rows, self.width), dtype=self.wire, device=first.device)
        for span in self.spans:
            lanes = as_lanes(tensors[span.name].detach(), self.wire)
            raw_view(out)[:, self.span(span.name)].copy_(raw_view(lanes))
        return out

    def unpack(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inverse of `pack`: [T, width] -> [T, columns] per span, views where the layout allows it."""
        if rows.ndim != 2 or rows.shape[1] != self.width or rows.dtype != self.wire:
            raise ValueError(
                f"rows of payload {self.kind} are {rows.dtype} {list(rows.shape)}, "
                f"allowed: {self.wire} [rows, {self.width}]"
            )
        return {span.name: from_lanes(rows[:, self.span(span.name)], span.dtype) for span in self.spans}

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> int:
        names = [span.name for span in self.spans]
        if set(tensors) != set(names):
            raise ValueError(f"payload {self.kind} got {sorted(tensors)}, allowed: {names}")
        rows = {tensors[name].shape[0] if tensors[name].ndim else -1 for name in names}
        for span in self.spans:
            tensor = tensors[span.name]
            if tensor.ndim != 2 or tensor.shape[1] != span.columns or tensor.dtype != span.dtype:
                raise ValueError(
                    f"span {span.name} of payload {self.kind} is {tensor.dtype} {list(tensor.shape)}, "
                    f"allowed: {span.dtype} [rows, {span.columns}]"
                )
        if len(rows) != 1:
            raise ValueError(f"spans of payload {self.kind} have {sorted(rows)} rows, allowed: one number for all")
        return rows.pop()


def payload(
    kind: str,
    *,
    head_dim: int,
    index_head_dim: int,
    kv_dtype: torch.dtype,
    state_dtype: torch.dtype,
    wire: torch.dtype,
) -> Payload:
    """The payload that a layer of this kind gathers over the context group.

    kv: the key row of a window layer. hca: compressor value and score projections and the key row. csa_main: the
    two overlapping windows of the main compressor. csa_aux: those of the indexer's compressor and the key row.
    """
    kv = Span("kv", head_dim, kv_dtype)
    spans = {
        "kv": (kv,),
        "hca": (Span("value", head_dim, state_dtype), Span("score", head_dim, state_dtype), kv),
        "csa_main": (Span("value", 2 * head_dim, state_dtype), Span("score", 2 * head_dim, state_dtype)),
        "csa_aux": (
            Span("index_value", 2 * index_head_dim, state_dtype),
            Span("index_score", 2 * index_head_dim, state_dtype),
            kv,
        ),
    }
    if kind not in spans:
        raise ValueError(f"payload kind is {kind!r}, allowed: {list(KINDS)}")
    return Payload(kind, spans[kind], wire)
