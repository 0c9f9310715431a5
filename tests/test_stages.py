"""The clock of stages: what it counts, and that it waits for a device that works behind the program."""

import time

import pytest
import torch

from meshspark.models.stages import StageClock


def test_a_disabled_clock_counts_nothing_but_knows_the_stage() -> None:
    clock = StageClock()
    with clock("moe"):
        assert clock.current == "moe"
    assert clock.seconds == {} and clock.current is None


def test_after_an_exception_the_stage_is_known() -> None:
    clock = StageClock(enabled=True)
    with pytest.raises(KeyError), clock("moe"), clock("gather"):
        raise KeyError
    assert clock.current == "gather"


def test_stages_add_up_and_nested_ones_count_in_both() -> None:
    clock = StageClock(enabled=True)
    for _ in range(2):
        with clock("outer"), clock("inner"):
            time.sleep(0.01)
    assert 0.02 <= clock.seconds["inner"] <= clock.seconds["outer"]


def test_work_of_a_device_counts_where_it_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of pretended work: what a stage launches takes its time only when somebody waits for it."""
    pending: list[float] = []
    waited_for: list[object] = []

    def synchronize(device: object) -> None:
        waited_for.append(device)
        time.sleep(sum(pending))
        pending.clear()

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    clock = StageClock(enabled=True, device="cuda:1")
    pending.append(0.2)
    with clock("quick"):
        pass
    with clock("slow"):
        pending.append(0.2)
    with clock("after"):
        pass
    assert clock.seconds["slow"] >= 0.2
    assert max(clock.seconds["quick"], clock.seconds["after"]) < 0.15
    assert set(waited_for) == {"cuda:1"}


@pytest.mark.parametrize(("enabled", "device"), [(True, "cpu"), (False, "cuda:0")])
def test_nobody_waits_on_the_cpu_or_without_a_clock(
    enabled: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: pytest.fail("waited"))
    with StageClock(enabled, device)("moe"):
        pass
