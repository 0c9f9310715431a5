"""generate with drafting on a synthetic DSpark checkpoint: the same ids, what is told, --compare, and refusals."""

import json
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from meshspark.launch import compare_runs, generate
from meshspark.launch.compare_runs import Comparison, Divergence, compare, divergences, turns
from meshspark.launch.drafting import Drafting
from meshspark.launch.worker import unranked_environment
from meshspark.launch.writing import Writing
from meshspark.models.checkpoint.synthetic import synthesize
from meshspark.models.dspark.calibration import Calibration
from meshspark.models.v4.config import tiny, tiny_dspark, tiny_mtp

PATIENCE = 200.0
PROMPTS = ["--prompt", "def f(x):", "--prompt", "import os"]
DRAFTS = ["--speculative", "dspark"]
NEW = {"tokens_per_step", "acceptance", "drafts"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of each kind, by its drafter; never written to."""
    made = {kind: tmp_path_factory.mktemp("drafts") / kind for kind in ("dspark", "mtp", "none")}
    for kind, config in zip(made, (tiny_dspark(), tiny_mtp(), tiny()), strict=True):
        synthesize(made[kind], config, 5)
    return made


@pytest.fixture
def run(folders, tmp_path, capsys):
    """generate in this process: its JSON, and what it printed on both streams."""

    def call(*argv, kind="dspark"):
        target = tmp_path / "out.json"
        code = generate.main(["--checkpoint", str(folders[kind]), *argv, "--json", str(target)])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return json.loads(target.read_text()), shown

    return call


def start(folder, *argv):
    """generate in processes of its own: its JSON and standard error."""
    command = [sys.executable, "-m", "meshspark.launch.generate", "--checkpoint", str(folder), *argv, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, encoding="utf-8", check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def test_drafting_changes_no_token_and_tells_of_itself(run):
    more = [*PROMPTS, "--max-new-tokens", "9"]
    plain, _ = run(*more)
    drafted, shown = run(*more, *DRAFTS)
    assert drafted["requests"] == plain["requests"]
    assert set(plain) == {"schema", "requests", "topology", "metrics"} and not NEW & set(plain["metrics"])
    assert set(drafted) - set(plain) == {"drafting"}
    assert set(drafted["metrics"]) - set(plain["metrics"]) == NEW
    assert drafted["drafting"] == {
        "speculative": "dspark", "gamma": 5, "verify": "all", "temperatures": None, "point_drafts": False,
    }  # fmt: skip
    metrics = drafted["metrics"]
    assert set(metrics["acceptance"]) == {"conditional", "cumulative"}
    assert all(len(shares) == 5 for shares in metrics["acceptance"].values())
    counts = metrics["drafts"]
    emitted = sum(len(r["output_ids"]) - 1 for r in drafted["requests"])
    turns_taken = emitted - counts["accepted"]
    assert metrics["tokens_per_step"] == emitted / turns_taken
    assert counts["wasted_rows"] == counts["verified"] - counts["accepted"]
    assert counts["proposed"] >= counts["verified"] > 0
    assert counts["draft_seconds"] > 0 and counts["verify_seconds"] > 0
    assert metrics["stages"]["draft_moe"] > 0 and metrics["stages"]["moe"] > 0
    assert "drafting: dspark, 5 drafts, verify all" in shown.out and "acceptance by position of the draft" in shown.out
    assert f"{counts['proposed']:,}" in shown.out


def test_gamma_and_verify(run):
    more = [*PROMPTS, "--max-new-tokens", "6"]
    plain, _ = run(*more)
    few, shown = run(*more, *DRAFTS, "--gamma", "2", "--verify", "threshold:0.5")
    assert few["requests"] == plain["requests"] and "UserWarning" not in shown.err
    assert few["drafting"]["gamma"] == 2 and few["drafting"]["verify"] == "threshold:0.5"
    assert len(few["metrics"]["acceptance"]["cumulative"]) <= 2
    with pytest.warns(UserWarning, match=r"gamma is 7, but the drafter was trained on blocks of 5"):
        wide, _ = run(*more, *DRAFTS, "--gamma", "7", "--verify", "scheduled")
    assert wide["requests"] == plain["requests"] and wide["drafting"]["gamma"] == 7


def test_an_mtp_layer_drafts_one(run):
    more = [*PROMPTS, "--max-new-tokens", "7"]
    plain, _ = run(*more, kind="mtp")
    drafted, shown = run(*more, "--speculative", "mtp", kind="mtp")
    assert drafted["requests"] == plain["requests"]
    assert drafted["drafting"]["gamma"] == 1 and len(drafted["metrics"]["acceptance"]["cumulative"]) == 1
    assert drafted["metrics"]["drafts"]["verified"] > 0 and "drafting: mtp, 1 drafts" in shown.out


def test_a_calibration_beside_the_checkpoint_is_used_where_confidence_matters(folders, run, tmp_path, capsys):
    folder = Path(shutil.copytree(folders["dspark"], tmp_path / "calibrated"))
    Calibration(5, (2.0,) * 5, (0.1,) * 5, (0.1,) * 5, (None,) * 5, (None,) * 5, 10).save(folder)
    more = ["--checkpoint", str(folder), "--prompt", "a", *DRAFTS]

    def drafting(*argv):
        args = generate.parser().parse_args([*more, *argv])
        return generate.prepare(args, generate.resolve_here(args)).drafting

    assert drafting("--verify", "threshold:0.3").temperatures == (2.0,) * 5
    assert drafting().temperatures is None and drafting("--gamma", "3").temperatures is None
    given = drafting("--verify", "lagged", "--temperature", "1", "--point-drafts").arguments(object())
    assert given["temperatures"] == (2.0,) * 5 and given["point_drafts"] is True
    assert given["verify"].kind == "lagged" and drafting().arguments(None) == {}
    assert generate.main([*more, "--verify", "lagged", "--gamma", "3"]) == 2
    assert "is for gamma 5, asked for is 3" in capsys.readouterr().err


def test_a_point_drafts_as_many_as_it_verifies(folders, run, capsys):
    own = ["--numerics", "float32", "--ep", "1", "--tp", "1", "--context", "64", "--batch", "2"]
    more = ["--prompt", "abc", "--max-new-tokens", "3", "--deployment", "flash-dspark-16", *own]
    with pytest.warns(UserWarning, match="gamma is 7"):
        drafted, shown = run(*more)
    assert drafted["drafting"]["gamma"] == 7
    cells = {
        row.split()[1]: row.replace("\u2502", " ").split()[1:] for row in shown.out.splitlines() if "\u2502 --" in row
    }
    assert cells["--speculative"] == ["dspark", "dspark"] and cells["--gamma"] == ["7", "7"]
    other, shown = run(*more, "--gamma", "3")
    assert other["drafting"]["gamma"] == 3 and "\u2502 --gamma" in shown.out
    assert generate.main(["--checkpoint", str(folders["none"]), *more]) == 2
    assert "--speculative is dspark, but" in capsys.readouterr().err


def test_sampling_with_either_kind_of_drafts(run):
    more = [*PROMPTS, "--max-new-tokens", "8", "--temperature", "1", "--seed", "4"]
    drawn, _ = run(*more, *DRAFTS)
    again, _ = run(*more, *DRAFTS)
    assert drawn["requests"] == again["requests"]
    point, _ = run(*more, *DRAFTS, "--point-drafts")
    assert point["drafting"]["point_drafts"] is True
    assert all(len(r["output_ids"]) == 8 for r in point["requests"])


def test_ignore_eos_goes_on_to_the_length(run, monkeypatch):
    free, _ = run("--prompt", "abc", "--max-new-tokens", "8")
    ids = free["requests"][0]["output_ids"]
    read, third = generate.read_config, ids[2]

    def with_eos(folder):
        config = read(folder)
        object.__setattr__(config, "eos_token_id", third)
        return config

    monkeypatch.setattr(generate, "read_config", with_eos)
    for drafts in ([], DRAFTS):
        ended, _ = run("--prompt", "abc", "--max-new-tokens", "8", *drafts)
        assert ended["requests"][0]["output_ids"] == ids[: ids.index(third)]
        assert ended["requests"][0]["finish_reason"] == "eos"
        on, _ = run("--prompt", "abc", "--max-new-tokens", "8", "--ignore-eos", *drafts)
        assert on["requests"][0]["finish_reason"] == "length" and third not in on["requests"][0]["output_ids"]
        assert len(on["requests"][0]["output_ids"]) == 8


def test_compare_measures_both_in_one_run(run, monkeypatch):
    plain, _ = run(*PROMPTS, "--max-new-tokens", "5")
    monkeypatch.setattr(compare_runs, "ROUNDS", 2)
    compared, shown = run(*PROMPTS, "--max-new-tokens", "5", *DRAFTS, "--compare")
    metrics = compared["metrics"]
    rounds = metrics["comparison"]["rounds"]
    assert len(rounds) == 2 and all(value > 0 for each in rounds for value in each.values())
    ratios = [each["drafted_tokens_per_s"] / each["plain_tokens_per_s"] for each in rounds]
    assert metrics["speedup"] == pytest.approx(sum(ratios) / 2)
    assert metrics["comparison"]["same_ids"] is True and metrics["comparison"]["divergences"] == []
    assert compared["requests"] == plain["requests"]
    assert shown.out.count("--- prompt 1: 5 tokens") == 1, "the text is shown once"
    assert "speed-up" in shown.out and "same ids as without" in shown.out


def test_two_ranks_write_what_one_writes(folders, run):
    more = [*PROMPTS, "--max-new-tokens", "5", *DRAFTS]
    alone, _ = run(*more)
    code, together, said = start(folders["dspark"], *more, "--tp", "2", "--ep", "2")
    assert code == 0, said
    assert together["requests"] == alone["requests"] and together["topology"]["tp"] == 2
    assert together["metrics"]["acceptance"] == alone["metrics"]["acceptance"]
    counts = [{k: v for k, v in r["metrics"]["drafts"].items() if "seconds" not in k} for r in (alone, together)]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_two_ranks_compare(folders):
    code, compared, said = start(
        folders["dspark"], *PROMPTS, "--max-new-tokens", "5", *DRAFTS, "--compare", "--tp", "2"
    )
    assert code == 0, said
    assert compared["metrics"]["comparison"]["same_ids"] is True and compared["metrics"]["speedup"] > 0


def test_ranks_compare_how_they_draft(folders):
    """Everything that could make ranks draft differently is among the facts that they compare at their start."""
    flags = generate.parser().parse_args(["--checkpoint", str(folders["dspark"]), "--prompt", "a"])
    task = generate.prepare(flags, generate.resolve_here(flags))
    assert task.drafting == Drafting() and task.facts()["drafting"] == repr(Drafting())
    changes = {"speculative": "dspark", "gamma": 3, "verify": "lagged", "point": True, "compare": True}
    changes["temperatures"] = (1.5,) * 5
    facts = {replace(task, drafting=Drafting(**{name: value})).facts()["drafting"] for name, value in changes.items()}
    assert len(facts) == 6 and task.facts()["drafting"] not in facts


def test_ranks_that_would_draft_differently_are_refused(folders):
    """Two ranks started by hand with other numbers of drafts: both end at the start, and the field is named."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "meshspark.launch.generate", "--checkpoint", str(folders["dspark"])]
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            more = {**place, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            own = {**unranked_environment(), **more, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = [*command, "--prompt", "a", *DRAFTS, "--gamma", str(2 + rank)]
            ranks.append(subprocess.Popen(words, env=own, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE))
            stack.callback(ranks[-1].kill)
        said = [process.communicate(timeout=PATIENCE)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1], said
    assert "drafting" in said[0] and "gamma=2" in said[0] and "gamma=3" in said[0], said


@pytest.mark.parametrize(
    ("kind", "argv", "said"),
    [
        ("none", [*DRAFTS], "has no drafter; allowed: none"),
        ("mtp", [*DRAFTS], "has a plain MTP layer; allowed: none, mtp"),
        ("none", ["--speculative", "mtp"], "--speculative is mtp, but"),
        ("dspark", ["--speculative", "mtp"], "has a DSpark drafter; allowed: none, dspark"),
        ("mtp", ["--speculative", "mtp", "--gamma", "2"], "--gamma is 2, allowed: 1, for an MTP layer"),
        ("dspark", ["--gamma", "3"], "--gamma is 3, but needs a drafter, and --speculative is none"),
        ("dspark", ["--verify", "all"], "--verify is all, but needs a drafter"),
        ("dspark", ["--temperature", "1", "--point-drafts"], "--point-drafts needs a drafter"),
        ("dspark", ["--compare"], "--compare needs a drafter"),
        ("dspark", [*DRAFTS, "--gamma", "0"], "--gamma is 0, allowed: 1 to 1,024"),
        ("dspark", [*DRAFTS, "--verify", "some"], "--verify is 'some', allowed: all, threshold:NUMBER"),
        ("dspark", [*DRAFTS, "--verify", "threshold:2"], "--verify is 'threshold:2', allowed"),
        ("dspark", [*DRAFTS, "--point-drafts"], "--point-drafts needs --temperature above 0"),
        ("dspark", [*DRAFTS, "--verify", "lagged", "--context", "7"], "--context is 7, allowed: 8 to"),
        ("dspark", ["--speculative", "eagle"], "invalid choice: 'eagle'"),
    ],
)
def test_refusals_come_before_any_rank_starts(folders, kind, argv, said, capsys, monkeypatch):
    monkeypatch.setattr(generate, "run_job", lambda *_: pytest.fail("ranks were started"))
    assert generate.main(["--checkpoint", str(folders[kind]), "--prompt", "x", *argv]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_a_divergence_is_told_and_fails_where_none_may_be(run, folders, tmp_path, capsys, monkeypatch):
    """One token of the drafted runs is changed behind the engine's back."""
    take = Writing.take

    def spoil(writing, event):
        shown = take(writing, event)
        if len(writing.output_ids) >= 3 and drafting[0]:
            writing.output_ids[2] = 7
        return shown

    drafting = [False]
    engine = generate.Engine

    def note(*args, **kwargs):
        drafting[0] = "proposer" in kwargs
        return engine(*args, **kwargs)

    monkeypatch.setattr(generate, "Engine", note)
    monkeypatch.setattr(Writing, "take", spoil)
    monkeypatch.setattr(compare_runs, "ROUNDS", 1)
    target = tmp_path / "diverged.json"
    argv = ["--checkpoint", str(folders["dspark"]), "--prompt", "abc", "--max-new-tokens", "4", *DRAFTS, "--compare"]
    assert generate.main([*argv, "--json", str(target)]) == 1
    told = capsys.readouterr()
    assert "drafting changed ids that are promised to be the same here: prompt 1, new token 2:" in told.err
    assert "prompt 1, new token 2:" in told.out
    comparison = json.loads(target.read_text())["metrics"]["comparison"]
    assert comparison["same_ids"] is False
    (found,) = comparison["divergences"]
    assert (found["prompt"], found["position"], found["drafted"]) == (1, 2, 7) and found["plain"] != 7
    # A token changed by hand is no tie, and it is said so.
    assert found["tied"] is False and found["ulps"] > 2 and "no tie" in told.out and set(found) == {
        "prompt", "position", "plain", "drafted", "ulps", "tied",
    }  # fmt: skip


class Written:
    """Stands in for a Writing: ids are all that is compared."""

    def __init__(self, *ids: int) -> None:
        self.prompt_ids, self.output_ids = [50, 51], list(ids)


def test_where_ids_part() -> None:
    plain = [Written(1, 2, 3), Written(1, 2), Written(4, 5, 6), Written()]
    drafted = [Written(1, 2, 3), Written(1, 2, 9), Written(4, 7, 6), Written(8)]
    assert divergences(plain, drafted) == [
        Divergence(2, 2, None, 9, (50, 51, 1, 2)), Divergence(3, 1, 5, 7, (50, 51, 4)),
        Divergence(4, 0, None, 8, (50, 51)),
    ]  # fmt: skip


def test_rounds_take_turns_and_their_median_counts() -> None:
    order = turns()
    assert order[:2] == [False, True] and order[-1] is True and len(order) == 2 + 2 * compare_runs.ROUNDS
    pairs = list(zip(order[2::2], order[3::2], strict=True))
    assert all(a != b for a, b in pairs) and {a for a, _ in pairs} == {True, False}
    assert Comparison(((1.0, 2.0), (1.0, 5.0), (2.0, 6.0)), ()).speedup == 3
    assert Comparison(((0.0, 0.0),), ()).speedup is None
    runs = []
    for number, drafts in enumerate(order):
        ids = range(11 if drafts else 6)
        metrics = {"decode_seconds": 100.0 if number < 2 else 1.0}
        runs.append((drafts, compare_runs.Run((Written(*ids),), metrics)))
    assert compare(runs).rounds == ((5.0, 10.0),) * compare_runs.ROUNDS
