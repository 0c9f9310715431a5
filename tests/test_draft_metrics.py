"""What is counted of drafts, by hand: acceptance by position at stops, trimmed widths, ends by another token."""

import pytest

from meshspark.launch.draft_metrics import DraftMetrics
from meshspark.models.dspark.step import StepSeconds, Told

DRAFTS = (11, 12, 13)


def told(width: int, *tokens: int, finish: str | None = None) -> Told:
    return Told(slot=0, generation=1, width=width, tokens=tokens, finish=finish)


def counted(*turns: Told, drafts: tuple[int, ...] = DRAFTS) -> dict:
    metrics = DraftMetrics()
    for turn in turns:
        metrics.learned(turn, drafts)
    return metrics.report()


def test_nothing_is_none_and_not_zero() -> None:
    report = DraftMetrics().report()
    assert report["tokens_per_step"] is None
    assert report["acceptance"] == {"conditional": [], "cumulative": []}
    assert report["drafts"]["proposed"] == 0 and report["drafts"]["draft_seconds"] == 0


def test_whole_blocks_by_position() -> None:
    """All three, then one, then none accepted: 4 + 2 + 1 tokens."""
    report = counted(told(4, 11, 12, 13, 9), told(4, 11, 9), told(4, 9))
    assert report["tokens_per_step"] == pytest.approx(7 / 3)
    assert report["acceptance"]["cumulative"] == [2 / 3, 1 / 3, 1 / 3]
    assert report["acceptance"]["conditional"] == [2 / 3, 1 / 2, 1]
    assert report["drafts"]["proposed"] == 9 and report["drafts"]["verified"] == 9
    assert report["drafts"]["accepted"] == 4 and report["drafts"]["wasted_rows"] == 12 - 7


def test_drafts_that_were_not_verified_are_not_judged() -> None:
    """A width of 2 says something about the first draft alone; a width of 1 about none."""
    report = counted(told(2, 11, 9), told(1, 9))
    assert report["acceptance"]["cumulative"] == [1, None, None]
    assert report["acceptance"]["conditional"] == [1, None, None]
    assert report["drafts"] == {
        "proposed": 6, "verified": 1, "accepted": 1, "wasted_rows": 0, "verify_seconds": 0, "draft_seconds": 0,
    }  # fmt: skip
    assert report["tokens_per_step"] == 1.5


def test_a_draft_that_ends_the_request_was_accepted_and_leaves_the_rest_open() -> None:
    """The second draft is the end token: it counts as accepted, but is not emitted; the third was never decided."""
    report = counted(told(4, 11, 12, finish="eos"))
    assert report["acceptance"]["cumulative"] == [1, 1, None]
    assert report["drafts"]["accepted"] == 2
    assert report["tokens_per_step"] == 1 and report["drafts"]["wasted_rows"] == 3


def test_another_token_that_ends_the_request_rejected_the_drafts_behind() -> None:
    report = counted(told(4, 11, 99, finish="eos"))
    assert report["acceptance"]["cumulative"] == [1, 0, 0]
    assert report["acceptance"]["conditional"] == [1, 0, None]
    assert report["drafts"]["accepted"] == 1 and report["tokens_per_step"] == 1


def test_the_target_s_own_token_after_all_drafts_is_no_draft() -> None:
    """Also where it ends the request, and where it happens to be what a draft was."""
    for finish in (None, "length"):
        report = counted(told(4, 11, 12, 13, 13, finish=finish))
        assert report["acceptance"]["cumulative"] == [1, 1, 1]
        assert report["drafts"]["accepted"] == 3 and report["tokens_per_step"] == 4
    trimmed = counted(told(2, 11, 12, finish="length"))
    assert trimmed["acceptance"]["cumulative"] == [1, None, None] and trimmed["drafts"]["accepted"] == 1


def test_a_row_that_is_not_finite_says_nothing_of_its_draft() -> None:
    report = counted(told(4, 11, -1, finish="error"))
    assert report["acceptance"]["cumulative"] == [1, None, None]
    assert report["drafts"]["accepted"] == 1 and report["tokens_per_step"] == 1


def test_requests_without_drafts_count_as_turns_of_one_token() -> None:
    report = counted(told(1, 9), told(1, 8, finish="length"), drafts=())
    assert report["tokens_per_step"] == 1 and report["acceptance"] == {"conditional": [], "cumulative": []}
    assert report["drafts"]["wasted_rows"] == 0


def test_blocks_of_several_lengths() -> None:
    metrics = DraftMetrics()
    metrics.learned(told(2, 11, 9), (11,))
    metrics.learned(told(3, 11, 12, 9), (11, 12))
    assert metrics.report()["acceptance"] == {"conditional": [1, 1], "cumulative": [1, 1]}


def test_seconds_add_up() -> None:
    metrics = DraftMetrics()
    for _ in range(2):
        metrics.ran(StepSeconds(verify=0.5, draft=0.25))
    assert metrics.report()["drafts"]["verify_seconds"] == 1 and metrics.report()["drafts"]["draft_seconds"] == 0.5
