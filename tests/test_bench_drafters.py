"""`meshspark bench drafters`: what is told of a drafter of known quality, of three checkpoints, and of wrong ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from episodes import single_model
from rank_pool import RankPools

from meshspark.benchmarks import drafter_runs
from meshspark.benchmarks.drafter_report import make_rows
from meshspark.benchmarks.drafter_runs import (
    PLAIN,
    Drafter,
    Load,
    Side,
    at_threshold,
    load_drafters,
    measure,
    parted,
    reliability,
    write,
)
from meshspark.benchmarks.drafters import main, parser
from meshspark.benchmarks.oracle import OracleProposer
from meshspark.launch.drafting import Drafting
from meshspark.launch.worker import resolve_here
from meshspark.models.checkpoint.synthetic import synthesize
from meshspark.models.dspark.calibration import Calibration, Rollouts, rollout_survivals
from meshspark.models.dspark.reliability import expected_calibration_error
from meshspark.models.v4.config import PRESETS
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

PROMPTS = ((5, 6, 7, 8), (9, 10, 11, 12), (13, 14, 15, 16))
SMALL = ["--prompts", "3", "--prompt-tokens", "8", "--new-tokens", "8", "--batch", "2", "--rounds", "1"]
CHECKPOINTS = {"spark": "tiny-dspark", "layer": "tiny-mtp", "bare": "tiny"}
HEAT = (2.0,) * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one target, a calibration beside the first, and a text; never written to."""
    made = tmp_path_factory.mktemp("drafters")
    for name, preset in CHECKPOINTS.items():
        synthesize(made / name, PRESETS[preset](), 3)
    synthesize(made / "other", PRESETS["tiny-mtp"](), 4)
    Calibration(5, HEAT, (0.1,) * 5, (0.1,) * 5, (None,) * 5, (None,) * 5, 10).save(made / "spark")
    (made / "text").write_text("".join(f"line {n} of a text\n" for n in range(40)))
    return made


def test_a_drafter_of_known_quality() -> None:
    """Of four drafts the first two are right: three tokens a step, whatever it is asked."""
    model, gamma, new = single_model("tiny", "float32"), 4, 19
    load = Load(PROMPTS, 4, new, batch=3)
    bare = Drafter("bare", model, Drafting())
    text = write(bare, Drafting(), load)
    assert text is not None and [len(ids) for ids in text.ids] == [new] * 3 and text.tokens == 3 * (new - 1)
    assert text.turns == text.emitted == 3 * (new - 1) and text.verified == 0 and text.seconds > 0
    known = {slot: (*PROMPTS[slot], *text.ids[slot]) for slot in range(3)}
    oracle = OracleProposer(gamma, known, lambda slot, anchor, number: number < 2, model.config.vocab_size, 0.5)
    good = Drafter("good", model, Drafting("dspark", gamma), oracle)
    sides = measure([good, bare], "words", load, rounds=1, thresholds=(0.4, 0.6))
    assert [side.name for side in sides] == [PLAIN, "good", "bare"]
    _, side, without = sides
    assert side.accepted_length == 3 and side.first.tokens_per_step == 3 and not side.parted
    # Eighteen tokens are six turns; the last has room for three rows, the others are verified whole.
    assert side.blocks is not None and side.blocks.accepted_N.tolist() == [2] * 15
    assert side.first.acceptance["conditional"][:3] == [1, 1, 0]
    assert side.first.acceptance["cumulative"] == [1, 1, 0, 0]
    # Confidences are 0.5 each: all of them are above 0.4, none above 0.6.
    low, high = side.sweep
    assert (low.threshold, low.tokens_per_step) == (0.4, 3) and low.accepted == side.first.accepted
    assert low.accepted_share is not None and 0.5 <= low.accepted_share < 0.6
    assert (high.verified, high.accepted_share, high.tokens_per_step, high.verified_per_step) == (0, None, 1, 0)
    assert len(side.rates) == 1 and min(side.rates) > 0
    assert without.blocks is None and without.sweep == () and without.accepted_length is None
    assert without.first.ids == sides[0].first.ids == side.first.ids


def rounds(name: str, *rates: float, domain: str = "words", blocks: Rollouts | None = None) -> Side:
    first = drafter_runs.Written(((1, 2),), 1, 1.0, 1, 1, 0, 0, {"conditional": [], "cumulative": []})
    return Side(name, domain, first, rates, blocks)


def test_ratios_are_taken_within_rounds() -> None:
    sides = [rounds(PLAIN, 1, 10, 4), rounds("a", 2, 30, 4), rounds("b", 4, 10, 1)]
    rows = {row["drafter"]: row for row in make_rows(sides, [], "b")}
    assert rows["a"]["over_plain"] == (2, 1, 3) and rows["a"]["over_against"] == (3, 0.5, 4)
    assert rows[PLAIN]["over_plain"] == (1, 1, 1) and rows["a"]["tokens_per_s"] == 4
    assert rounds("a", 0.0).over(rounds("b", 1.0)) is None


def test_reliability_with_the_fit_and_without() -> None:
    generator = torch.Generator().manual_seed(1)
    logit_NY = torch.randn(40, 2, generator=generator).double().numpy()
    accepted_N = torch.randint(0, 3, (40,), generator=generator).numpy()
    blocks = Rollouts(logit_NY, accepted_N, [3] * 40)
    fit = Calibration(2, (3.0, 0.5), (0.1,) * 2, (0.1,) * 2, (None,) * 2, (None,) * 2, 10)
    found, alone = reliability(blocks, fit), reliability(blocks, None)
    assert found is not None and alone is not None and found["blocks"] == 40
    for side, heat in (("before", None), ("after", fit.temperatures)):
        survival_NY = rollout_survivals(blocks, heat)
        expected = [expected_calibration_error(survival_NY[:, y], accepted_N > y) for y in range(2)]
        assert found[f"ece_{side}"] == expected and len(found[f"auc_{side}"]) == 2
    assert found["ece_before"] == alone["ece_before"] != found["ece_after"] and alone["ece_after"] is None
    assert reliability(Rollouts(logit_NY[:0], [], []), fit) is None


def test_where_ids_part_is_found_in_any_run() -> None:
    def run(*ids: tuple[int, ...]) -> drafter_runs.Written:
        return drafter_runs.Written(ids, 1, 1.0, 1, 1, 0, 0, {})

    plain = run((1, 2, 3), (4, 5))
    assert parted(plain, [plain, plain]) == ()
    assert parted(plain, [run((1, 2, 3), (4, 6)), plain, run((1, 9, 3), (4,))]) == ((1, 1), (2, 1))


def test_three_checkpoints_side_by_side(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "told.json"
    names = [flag for name in CHECKPOINTS for flag in ("--drafter", f"{name}={folder / name}")]
    pictures = ["--plot", str(tmp_path / "plot.png"), "--reliability", str(tmp_path / "reliability.png")]
    more = ["--text", f"mine={folder / 'text'}", "--thresholds", "0,1", "--json", str(target)]
    assert main([*names, *SMALL, *more, *pictures]) == 0
    shown = capsys.readouterr().out
    assert all((tmp_path / name).stat().st_size > 0 for name in ("plot.png", "reliability.png"))
    told = json.loads(target.read_text())
    assert told["benchmark"] == "drafters" and told["against"] == "layer"
    about = [(each["name"], each["kind"], each["gamma"], each["temperatures"]) for each in told["drafters"]]
    assert about == [("spark", "dspark", 5, list(HEAT)), ("layer", "mtp", 1, None), ("bare", "none", 0, None)]
    rows = {row["drafter"]: row for row in told["rows"]}
    assert list(rows) == [PLAIN, *CHECKPOINTS] and {row["domain"] for row in rows.values()} == {"mine"}
    assert all(row["requests"] == 3 and row["tokens"] == 21 and row["parted"] == [] for row in rows.values())
    assert all(len(row["over_plain"]) == 3 and row["over_plain"][0] > 0 for row in rows.values())
    assert rows["layer"]["over_against"] == [1, 1, 1] and rows["spark"]["over_against"] != [1, 1, 1]
    assert [len(rows[name]["conditional"]) for name in (PLAIN, "spark", "layer")] == [0, 5, 1]
    for name in ("spark", "layer"):
        row = rows[name]
        assert row["accepted_length"] >= 1 and row["tokens_per_step"] >= 1 and row["reliability"]["blocks"] > 0
        all_of_them, none = row["sweep"]
        assert (
            all_of_them["accepted"] == row["accepted"] and all_of_them["verified"] == row["verified"] > none["verified"]
        )
    assert rows["spark"]["reliability"]["ece_after"] is not None and rows["layer"]["reliability"]["ece_after"] is None
    assert "over layer" in shown and "accepted share" in shown and "ECE" in shown


def test_the_fit_beside_a_checkpoint_moves_thresholds(folder: Path) -> None:
    flags = resolve_here(parser().parse_args([]))
    spark, bare = load_drafters(Groups.single(), [("s", folder / "spark"), ("b", folder / "bare")], flags)
    assert at_threshold(spark, 0.3) == Drafting("dspark", 5, "threshold:0.3", temperatures=HEAT)
    assert spark.model.embed is bare.model.embed, "the target is held once"
    assert bare.proposer is None and bare.drafting == Drafting()


def test_sampled_runs_are_told_and_not_compared(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_runs, "parted", lambda *_: ((2, 5),))
    target = tmp_path / "told.json"
    words = ["--drafter", f"layer={folder / 'layer'}", "--text", f"mine={folder / 'text'}", *SMALL]
    assert main([*words, "--temperature", "1", "--json", str(target)]) == 0
    assert [row["parted"] for row in json.loads(target.read_text())["rows"]] == [[[2, 5]]] * 2


def test_ids_that_part_are_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One token of the drafted runs is changed behind the engine's back."""
    run = drafter_runs.write

    def spoiled(drafter: Drafter, drafting: Drafting, *more: Any) -> Any:
        found = run(drafter, drafting, *more)
        if found is not None and drafting.on:
            ids = (found.ids[0], (*found.ids[1][:4], found.ids[1][4] + 1, *found.ids[1][5:]), *found.ids[2:])
            object.__setattr__(found, "ids", ids)
        return found

    monkeypatch.setattr(drafter_runs, "write", spoiled)
    words = ["--drafter", f"layer={folder / 'layer'}", "--text", f"mine={folder / 'text'}", *SMALL]
    assert main(words) == 1
    shown = capsys.readouterr()
    assert "promised to be the same here: mine, layer, prompt 2, new token 4" in shown.err
    assert "1 parted" in shown.out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--drafter", "spark"], "--drafter is 'spark', allowed: a name, = and a path"),
        (["--drafter", "a={bare}", "--drafter", "a={bare}"], "has the names a, a, allowed: each once, and not plain"),
        (["--drafter", "plain={bare}"], "has the names plain, allowed: each once, and not plain"),
        (["--drafter", "a=nowhere"], "--drafter is 'nowhere', where there is no config.json"),
        (["--drafter", "a={bare}", "--against", "b"], "--against is 'b', allowed: a"),
        (["--drafter", "a={bare}", "--thresholds", "0.1,2"], "--thresholds is '0.1,2', allowed: numbers from 0 to 1"),
        (
            ["--drafter", "a={bare}", "--domains", "code,poems"],
            "--domains is 'code,poems', allowed: some of tables,code",
        ),
        (["--drafter", "a={bare}", "--text", "words"], "--text is 'words', allowed: a name, = and a path"),
        (["--drafter", "a={bare}", "--text", "t=nowhere"], "--text is 'nowhere', where there is no file"),
        (["--drafter", "a={bare}", "--new-tokens", "65000"], "--prompt-tokens and --new-tokens are 65064, allowed"),
        (["--drafter", "a={bare}", "--plot", "-"], "--plot is '-', allowed: a file"),
    ],
)
def test_wrong_flags_are_named(folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert main([flag.replace("{", f"{folder}/").replace("}", "") for flag in flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--drafter", "b={other}"], "other is of another target than the first checkpoint"),
        (["--prompts", "999"], "t has 10 windows of 64 tokens, needed: 999; give more text"),
    ],
)
def test_what_only_loading_tells(folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str) -> None:
    flags = ["--drafter", "a={spark}", "--text", "t={text}", *more]
    assert main([flag.replace("{", f"{folder}/").replace("}", "") for flag in flags]) == 1
    assert said in capsys.readouterr().err


def on_ranks(groups: Groups, folder: str) -> list[dict[str, Any]]:
    """What ranks find of two drafters, times left out."""
    flags = resolve_here(parser().parse_args(["--tp", str(groups.topology.tp), "--ep", str(groups.topology.ep)]))
    drafters = load_drafters(groups, [(name, Path(folder) / name) for name in ("spark", "layer")], flags)
    load = Load(PROMPTS if groups.rank == 0 else (), 4, 7, batch=2)
    rows = make_rows(measure(drafters, "words", load, rounds=1, thresholds=(0.5,)), drafters, None)
    timed = ("tokens_per_s", "over_plain", "over_against")
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]


@pytest.mark.slow
def test_two_ranks_find_what_one_finds(folder: Path, ranks: RankPools) -> None:
    front, other = ranks.run(Topology(2, 2, 2), "test_bench_drafters:on_ranks", timeout=200, folder=str(folder))
    alone = json.loads(json.dumps(on_ranks(Groups.single(topology=Topology()), str(folder))))
    assert other == [] and len(front) == 3
    for here, there in zip(alone, front, strict=True):
        blocks = [(row.pop("reliability") or {}).get("blocks") for row in (here, there)]
        assert here == there and blocks[0] == blocks[1]
