"""FeatureSpec: what captured features are, declared beside them and compared with what a draft reads.

Letters: S positions of a sample, m captured layers, h streams, H hidden, F = m * H, or h * H.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..drafts.config import DraftConfig

STREAMS = "streams"
POINTS = ("mean_out", "mean_in", STREAMS)
"""Mean over the residual streams of a layer's output, or of what enters it (training.md 7.7: V4, V4.1), or the streams
of a layer's output themselves, which a plain MTP layer reads (model.md 7)."""
DTYPE = "bfloat16"
ITEM_BYTES = 2


@dataclass(frozen=True)
class FeatureSpec:
    """layers: captured ones of the target, in the order in which they stand side by side; point: one of POINTS;
    teacher: whether the state that enters the target's LM head is there too; streams: how many there are of a layer at
    point "streams", which one layer has, side by side in their order; 1 elsewhere."""

    layers: tuple[int, ...]
    point: str
    hidden_size: int
    vocab_size: int
    teacher: bool = True
    dtype: str = DTYPE
    streams: int = 1

    def __post_init__(self) -> None:
        if not self.layers or any(type(layer) is not int or layer < 0 for layer in self.layers):
            raise ValueError(f"layers is {list(self.layers)}, allowed: one or more numbers from 0")
        if len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers is {list(self.layers)}, allowed: each layer once")
        if self.point not in POINTS:
            raise ValueError(f"point is {self.point!r}, allowed: {', '.join(POINTS)}")
        if self.point == STREAMS and len(self.layers) > 1:
            raise ValueError(f"layers is {list(self.layers)}, allowed at point {STREAMS!r}: one, the target's last")
        if self.point != STREAMS and self.streams != 1:
            raise ValueError(f"streams is {self.streams!r}, allowed at point {self.point!r}: 1")
        for name in ("hidden_size", "vocab_size", "streams"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 1 << 31:
                raise ValueError(f"{name} is {value!r}, allowed: 1 to 2**31 - 1")
        if type(self.teacher) is not bool:
            raise ValueError(f"teacher is {self.teacher!r}, allowed: true or false")
        if self.dtype != DTYPE:
            raise ValueError(f"dtype is {self.dtype!r}, allowed: {DTYPE}")

    @property
    def width(self) -> int:
        """F, columns of hidden_states."""
        return len(self.layers) * self.streams * self.hidden_size

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's states."""
        return ITEM_BYTES * (self.width + self.teacher * self.hidden_size)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `streams` at its point alone."""
        names = [f.name for f in fields(self) if f.name != "streams" or self.point == STREAMS]
        return {name: list(v) if isinstance(v := getattr(self, name), tuple) else v for name in names}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "FeatureSpec":
        """Inverse of to_dict for data of any origin. ValueError naming the key."""
        names = [f.name for f in fields(cls) if f.name != "streams" or raw.get("point") == STREAMS]
        missing = [name for name in names if name not in raw]
        if missing:
            raise ValueError(f"features declare no {', '.join(missing)}")
        values = {name: raw[name] for name in names}
        if not isinstance(values["layers"], list | tuple):
            raise ValueError(f"layers is {values['layers']!r}, allowed: a list of numbers")
        return cls(**{**values, "layers": tuple(values["layers"])})

    def require(self, wanted: "FeatureSpec", what: str = "features") -> None:
        """ValueError naming every field in which these features are not what a draft reads; a teacher that the draft
        has no use for is no difference."""
        differ = [
            f"{f.name} is {getattr(self, f.name)}, the draft needs {getattr(wanted, f.name)}"
            for f in fields(self)
            if f.name != "teacher" and getattr(self, f.name) != getattr(wanted, f.name)
        ]
        if wanted.teacher and not self.teacher:
            differ.append("there are no target_last_hidden_states, which the draft's objective needs")
        if differ:
            raise ValueError(f"{what} do not fit the draft: {'; '.join(differ)}")

    def check_target(self, num_layers: int, hidden_size: int, vocab_size: int, streams: int) -> None:
        """ValueError where a target of these sizes cannot give such features."""
        if max(self.layers) >= num_layers:
            raise ValueError(f"layers is {list(self.layers)}, but the target has layers 0 to {num_layers - 1}")
        sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size}
        if self.point == STREAMS:
            sizes["streams"] = streams
            if self.layers != (num_layers - 1,):
                raise ValueError(f"layers is {list(self.layers)}, allowed at point {STREAMS!r}: {num_layers - 1}")
        for name, own in sizes.items():
            if getattr(self, name) != own:
                raise ValueError(f"{name} is {getattr(self, name)}, but the target's is {own}")


def capture_point(config: DraftConfig) -> str:
    """Where a draft's target is captured: the last streams for an MTP layer, what enters a layer for the kind of V4.1,
    a layer's output for all others."""
    if config.is_mtp:
        return STREAMS
    return "mean_in" if config.dflash.attention_mode == "deepseek_v41" else "mean_out"


def draft_features(config: DraftConfig, teacher: bool) -> FeatureSpec:
    """The features that a draft reads; teacher: whether its objective compares with the target's distribution."""
    layers, point = config.dflash.target_layer_ids, capture_point(config)
    streams = config.residual.streams if config.is_mtp else 1
    return FeatureSpec(layers, point, config.hidden_size, config.vocab_size, teacher, streams=streams)
