"""A small training run on disk: a target, a draft's config, data, the data's features, and the command that trains."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshspark.launch import cli
from meshspark.models.checkpoint.synthetic import synthesize
from meshspark.models.v4.config import tiny

FEW = ["--steps", "4", "--batch", "2", "--anchors", "6", "--save-every", "1", "--log-every", "1", "--lr", "0.01"]


def write_scene(folder: Path, config: Mapping[str, Any]) -> None:
    """Write target, draft.json, data (five continuations of different length) and features into the folder."""
    synthesize(folder / "target", tiny(), 1)
    (folder / "draft.json").write_text(json.dumps(config))
    (folder / "data").mkdir()
    lines = []
    for n in range(5):
        ids = [(7 * n + 3 * i * i) % 260 for i in range(18 + 3 * n)]
        lines.append(json.dumps({"prompt_ids": ids[:5], "output_ids": ids[5:]}))
    (folder / "data" / "a.jsonl").write_text("\n".join(lines) + "\n")
    more = ["--data", str(folder / "data"), "--config", str(folder / "draft.json"), "--out", str(folder / "features")]
    assert cli.main(["features", "--checkpoint", str(folder / "target"), *more]) == 0


def train_command(place: Path, out: Path, *more: str, source: str = "features") -> list[str]:
    """Flags of train-drafter for four steps over the scene, from its features or its data."""
    base = ["--config", str(place / "draft.json"), "--checkpoint", str(place / "target")]
    return [*base, f"--{source}", str(place / source), "--out", str(out), *FEW, *more]
