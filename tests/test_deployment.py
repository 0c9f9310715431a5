"""The deployment point: what it fixes, what a flag changes, and that its page shows what is printed."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from meshspark.launch import cli
from meshspark.launch.deployment import DEPLOYMENTS, FLASH_DSPARK_16, Row, combine, deployment
from meshspark.launch.plan import at_point
from meshspark.launch.plan_data import GIB, rank_memory, room_for_caches
from meshspark.models.v4.sizing import fitting_requests

PAGE = Path(__file__).resolve().parent.parent / "docs" / "deployment.md"


def test_the_point() -> None:
    assert FLASH_DSPARK_16.settings() == {
        "preset": "flash-dspark", "numerics": "w8a8", "ranks": 16, "tp": 4, "ep": 16, "context": 1_048_576,
        "block_size": 32, "batch": 64, "verify_rows": 8, "prefill_rows": 512, "speculative": "dspark",
    }  # fmt: skip
    assert set(DEPLOYMENTS) == {"flash-dspark-16"}
    assert FLASH_DSPARK_16.gamma == 7
    with pytest.raises(ValueError, match="--deployment is 'other', allowed: flash-dspark-16"):
        deployment("other")


def test_a_flag_wins_and_both_are_kept() -> None:
    rows = {row.name: row for row in combine(FLASH_DSPARK_16, {"numerics": "bfloat16", "batch": 64, "tp": None})}
    assert rows["numerics"] == Row("numerics", "w8a8", "bfloat16", "bfloat16")
    assert rows["batch"] == Row("batch", 64, 64, 64)
    assert rows["tp"] == Row("tp", 4, None, 4)


def test_the_table_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--deployment", "flash-dspark-16", "--batch", "16", "--context", "8192"]) == 0
    shown = capsys.readouterr().out
    lines = {cells[0]: cells[1:] for cells in _cells(shown) if cells[0].startswith("--")}
    assert lines["--batch"] == ["64", "16", "16"] and lines["--context"] == ["1048576", "8192", "8192"]
    assert lines["--verify-rows"] == ["8", "", "8"]
    assert shown.index("deployment flash-dspark-16") < shown.index("plan of flash-dspark")


def test_json_tells_both(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--deployment", "flash-dspark-16", "--numerics", "bfloat16", "--speculative", "none", "--json"]
    assert cli.main(flags) == 0
    data = json.loads(capsys.readouterr().out)
    settings = {s["setting"]: s for s in data["deployment"]["settings"]}
    assert settings["numerics"] == {"setting": "numerics", "point": "w8a8", "flag": "bfloat16", "used": "bfloat16"}
    assert data["per_rank"]["pools"]["draft_kv"] == 0
    assert data["settings"]["verify_rows"] == 8 and data["settings"]["gamma"] == 0


def _cells(text: str) -> list[list[str]]:
    rows = [line for line in text.splitlines() if line.startswith("\N{BOX DRAWINGS LIGHT VERTICAL}")]
    return [[cell.strip() for cell in line.split("\N{BOX DRAWINGS LIGHT VERTICAL}")[1:-1]] for line in rows]


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"^    (meshspark plan --deployment [^\n]*)\n\n```text\n(.*?)```", text, flags=re.M | re.S)
    assert found is not None
    command, shown = found.groups()
    assert cli.main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out
    assert _trimmed(shown) == _trimmed(printed)


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def test_what_the_page_says_fits() -> None:
    """6 requests at the ceiling beside the rest in 64 GiB, or 64 of 97,280 positions; 24 GiB of weights."""
    for context, least in ((1 << 20, 6), (97_280, 64)):
        settings = at_point(context=context)
        memory = rank_memory(settings)
        room = room_for_caches(settings, memory)
        wish = replace(settings.wish, prefix_points=0)
        most = fitting_requests(settings.config, settings.numerics, wish, room)
        assert least <= most <= least + 1
        assert round(memory["weights"] / GIB) == 24


def test_the_page_gives_the_points_settings() -> None:
    """Every number of the point stands in its table beside the MTP point's."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| setting |") : text.index("## Cache families")]
    for value in ("1,048,576", "16,384", "| 32 |", "| 128 |", "512", "w8a8"):
        assert value in table, value
