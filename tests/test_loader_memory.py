"""Loading needs little more anonymous memory than what it returns; measured in a process of its own."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshspark.models.checkpoint.names import tensor_table
from meshspark.models.checkpoint.share import held_dtype, share_bytes
from meshspark.models.checkpoint.synthetic import synthesize
from meshspark.models.numerics import MODES
from meshspark.models.v4.config import V4Config, tiny
from meshspark.parallel.topology import Topology

MIB = 1 << 20
STATUS = Path("/proc/self/status")


def wide_config() -> V4Config:
    """About 40 MB stored, 250 MB in FP32, nearly all of it experts."""
    return replace(
        tiny(),
        hidden_size=256,
        moe_intermediate_size=256,
        n_routed_experts=64,
        num_hidden_layers=4,
        compress_ratios=(0, 4, 128, 0),
    )


def rss_anon() -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def peak_rise(work) -> tuple[object, int]:
    """work()'s result and the rise of RssAnon's peak over the moment before it, sampled by a thread."""
    peak, done = [0], threading.Event()

    def sample() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], rss_anon())
            time.sleep(0.0005)

    before = rss_anon()
    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        result = work()
    finally:
        done.set()
        watcher.join()
    return result, max(peak[0], rss_anon()) - before


def naive(folder: str) -> object:
    """All stored tensors at once, each decoded beside the others: what the bound is there to exclude."""
    from safetensors.torch import load_file

    everything = {}
    for path in Path(folder).glob("*.safetensors"):
        everything |= {name: tensor.clone() for name, tensor in load_file(path).items()}
    return [tensor.float().repeat(2, *[1] * (tensor.dim() - 1)) for tensor in everything.values()]


def measure(folder: str, sizes: list[int], rank: int, mode: str) -> None:
    from meshspark.models.checkpoint.loader import load_weights

    topology = Topology(*sizes)
    if mode == "naive":
        _, rise = peak_rise(lambda: naive(folder))
    else:
        _, rise = peak_rise(lambda: load_weights(folder, topology, rank, MODES[mode]))
    print(json.dumps({"rise": rise}))


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    synthesize(folder, wide_config(), 5, shard_bytes=16 * MIB)
    return folder


def rise_of(folder: Path, sizes: tuple[int, int, int], rank: int, mode: str) -> int:
    command = [sys.executable, __file__, str(folder), json.dumps(sizes), str(rank), mode]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(json.loads(done.stdout.splitlines()[-1])["rise"])


def bound(sizes: tuple[int, int, int], rank: int, mode: str) -> int:
    numerics = MODES[mode]
    largest = max(
        held_dtype(spec, numerics).itemsize * spec.shape[0] * spec.shape[-1] for spec in tensor_table(wide_config())
    )
    return share_bytes(wide_config(), Topology(*sizes), rank, numerics) + largest + 64 * MIB


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc/self/status, as on Linux")
@pytest.mark.parametrize(
    ("sizes", "rank", "mode"),
    [((4, 2, 4), 3, "float32"), ((1, 1, 1), 0, "bfloat16"), ((4, 4, 4), 1, "float64")],
)
def test_peak_memory_of_loading(wide, sizes, rank, mode):
    share = share_bytes(wide_config(), Topology(*sizes), rank, MODES[mode])
    rise = rise_of(wide, sizes, rank, mode)
    assert 0.9 * share < rise <= bound(sizes, rank, mode), f"{rise / MIB:.0f} MiB for a share of {share / MIB:.0f} MiB"


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc/self/status, as on Linux")
def test_the_measure_sees_a_loader_that_takes_everything(wide):
    """The bound can be broken: reading all at once breaks a quarter's."""
    assert rise_of(wide, (4, 2, 4), 3, "naive") > bound((4, 2, 4), 3, "float32")


if __name__ == "__main__":
    measure(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
