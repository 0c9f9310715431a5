"""One stage of V4's drafter at its true sizes, there and back, within 4 GB of memory; 3.5 GB stored, 13.5 in BF16."""

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_loader_memory import STATUS, peak_rise

from meshspark.models.checkpoint.reader import INDEX_NAME
from meshspark.models.checkpoint.stream import Planned, stream_shards
from meshspark.models.conversion.configs import official_shape
from meshspark.models.conversion.exporting import export_dspark
from meshspark.models.conversion.importing import import_dspark
from meshspark.models.conversion.variants import VARIANTS, official_table
from meshspark.models.v4.config import DSparkFields, flash_dspark

LIMIT = 4 * 10**9
ONE_STAGE = replace(flash_dspark(), draft_ratios=(0,), dspark=DSparkFields(5, 128799, (40, 41, 42), 256, 1))


def random_pieces(seed: int, dtype: str, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if dtype in ("BF16", "F32"):
        values = torch.randn(shape, generator=generator)
        yield values.bfloat16() if dtype == "BF16" else values
        return
    low, high = (118, 128) if dtype == "F8_E8M0" else (0, 256)
    codes = torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)
    if dtype == "F8_E4M3":
        codes[codes & 0x7F == 0x7F] = 0x3C
    yield codes.view({"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}[dtype])


def write(folder: Path) -> None:
    raw = ONE_STAGE.to_json()
    planned = []
    for number, spec in enumerate(official_table(VARIANTS["v4"], official_shape(VARIANTS["v4"], raw, "config.json"))):
        made = partial(random_pieces, 2 * number, spec.dtype, spec.stored_shape)
        planned.append(Planned(spec.name, spec.dtype, spec.stored_shape, made))
        if spec.scale_name is not None and spec.scale_shape is not None:
            scale = partial(random_pieces, 2 * number + 1, "F8_E8M0", spec.scale_shape)
            planned.append(Planned(spec.scale_name, "F8_E8M0", spec.scale_shape, scale))
    folder.mkdir()
    for _ in stream_shards(folder, planned, 10**9):
        pass
    (folder / "config.json").write_text(json.dumps(raw))


def measure(work: str, source: str, target: str) -> None:
    """rise: of our own memory. peak: of everything resident, what is mapped of files included."""
    torch.set_num_threads(1)
    if work == "write":
        write(Path(target))
    else:
        done = {"import": import_dspark, "export": partial(export_dspark, form="official")}[work]
        _, rise = peak_rise(lambda: done(Path(source), Path(target), VARIANTS["v4"], keep_scales=True))
        print(json.dumps({"rise": rise, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc/self/status, as on Linux")
def test_one_stage_at_true_sizes(tmp_path: Path) -> None:
    """Byte for byte, each way in a process of its own; 24 GB of disk."""
    places = [tmp_path / name for name in ("in", "ours", "out")]
    for work, source, target in (("write", "", places[0]), ("import", *places[:2]), ("export", *places[1:])):
        command = [sys.executable, __file__, work, str(source), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        if work != "write":
            told = json.loads(done.stdout.splitlines()[-1])
            print(work, told)
            assert told["peak"] < LIMIT, f"{work}: {told['peak'] / 1e9:.2f} GB"
    for path in sorted(places[0].glob("model-*.safetensors")):
        assert _differing(path, places[2]) == []


def _differing(path: Path, folder: Path) -> list[str]:
    """Names of the tensors of a shard that have other bytes in the folder."""
    shards = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    found = []
    with safe_open(str(path), framework="pt") as before:
        for name in before.keys():  # noqa: SIM118
            with safe_open(str(folder / shards[name]), framework="pt") as after:
                one, other = (each.get_tensor(name).contiguous().view(torch.uint8) for each in (before, after))
                if not torch.equal(one, other):
                    found.append(name)
    return found


if __name__ == "__main__":
    measure(*sys.argv[1:])
