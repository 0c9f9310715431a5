"""Settings for tests of the plan, and bytes of real tensors."""

from dataclasses import replace

from meshspark.launch.plan_data import Settings
from meshspark.models.numerics import MODES
from meshspark.models.v4.config import PRESETS
from meshspark.models.v4.estimate import Device
from meshspark.parallel.topology import Topology

DEVICE = Device(memory_gbs=1000, link_gbs=100, tflops=100, int8_tops=200, call_us=10)


def settings_of(preset: str, sizes: tuple[int, int, int], mode: str = "float32", **changes) -> Settings:
    base = Settings(
        PRESETS[preset](), Topology(*sizes), MODES[mode], context=512, batch=5, prefill_rows=32, verify_rows=1,
        block_size=32, device=DEVICE, device_gib=1.0,
    )  # fmt: skip
    return replace(base, **changes)


def unique_bytes(tensors) -> int:
    """Bytes of the storages behind tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
