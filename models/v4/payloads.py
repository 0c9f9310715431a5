"""What the layers of a model gather over the context group."""

from ...layouts.payloads import Payload, payload
from ..numerics import Numerics
from .config import V4Config

GATHERED = {0: ("kv",), 4: ("csa_aux", "csa_main"), 128: ("hca",)}
"""Compression ratio of a layer -> payloads that it gathers, in order."""


def model_payload(kind: str, config: V4Config, numerics: Numerics) -> Payload:
    """The payload of this kind at a model's sizes and dtypes."""
    return payload(
        kind,
        head_dim=config.head_dim,
        index_head_dim=config.index_head_dim,
        kv_dtype=numerics.kv,
        state_dtype=numerics.accumulation,
        wire=numerics.wire,
    )
