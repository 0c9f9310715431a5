"""Numerics: which dtype plays which role. Row independence of products is checked in selfcheck.py."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Numerics:
    """Dtypes by role.

    activation: inputs and outputs of matrix products; accumulation: norms, softmax, gates, hyper-connections,
    compressors, sums across ranks and the logits; kv: what the key caches hold; wire: the lane in which
    context payloads travel; stream: the residual streams between sub-layers.
    quantisation names a mode of weights and activations, None for none; w8a8 is BF16 but for products in INT8.
    """

    name: str
    activation: torch.dtype
    accumulation: torch.dtype
    kv: torch.dtype
    wire: torch.dtype
    stream: torch.dtype
    quantisation: str | None = None

    def __post_init__(self) -> None:
        narrow = self.accumulation.itemsize < max(4, self.activation.itemsize)
        if narrow:
            raise ValueError(
                f"accumulation is {self.accumulation}, allowed: not narrower than float32 nor than "
                f"activation {self.activation}"
            )


def _uniform(name: str, dtype: torch.dtype) -> Numerics:
    return Numerics(name, dtype, dtype, dtype, dtype, dtype)


FLOAT64 = _uniform("float64", torch.float64)
FLOAT32 = _uniform("float32", torch.float32)
BFLOAT16 = Numerics(
    "bfloat16",
    activation=torch.bfloat16,
    accumulation=torch.float32,
    kv=torch.bfloat16,
    wire=torch.bfloat16,
    stream=torch.float32,
)
W8A8 = replace(BFLOAT16, name="w8a8", quantisation="w8a8")
MODES = {n.name: n for n in (FLOAT64, FLOAT32, BFLOAT16, W8A8)}


def numerics(name: str) -> Numerics:
    """The mode of this name; ValueError for one that does not exist."""
    if name not in MODES:
        raise ValueError(f"numerics is {name!r}, allowed: {sorted(MODES)}")
    return MODES[name]
