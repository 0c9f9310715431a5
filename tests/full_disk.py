"""A disk that becomes full while a checkpoint is written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshspark.models.checkpoint import writer


def fail_second_shard(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """From now on the second shard cannot be written; the paths of all that were tried."""
    tried: list[Path] = []

    def failing(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        tried.append(path)
        if len(tried) == 2:
            raise OSError("disk full")
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(writer, "save_file", failing)
    return tried
