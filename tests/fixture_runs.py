"""How tests of stage and composition fixtures run them."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from rank_pool import to_bytes

from meshspark.launch.fixture import verdict_of
from meshspark.launch.fixtures import compositions, dspark, stages
from meshspark.launch.fixtures.harness import PASSED, Options, Run, run_fixture
from meshspark.launch.fixtures.record import Recorder

SMALL = {"start_pos": (0, 127, 251), "chunk": (9, 1, 6)}
"""A prompt's beginning, a decode row at a boundary of everything, a chunk over boundaries on a resident prefix."""


_LISTED = (*stages.FIXTURES, *compositions.FIXTURES, *dspark.FIXTURES)
BY_NAME = {fixture.name: fixture for fixture in _LISTED}


@dataclass(eq=False)
class Digest(Recorder):
    """A recorder that keeps nothing of the outputs but a digest of their bits."""

    seen: Any = field(default_factory=hashlib.sha256)

    def output(self, output):
        packed = to_bytes(output.got)
        self.seen.update(f"{output.name} {packed['dtype']} {packed['shape']}".encode() + packed["data"])
        return super().output(output)


def options_of(given):
    """Options from plain data, whose tuples have become lists."""
    return Options(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})


def passed(fixture, groups, given):
    """The rows of a fixture, all of which must have passed where there was anything, and a digest of the outputs."""
    recorder = Digest()
    rows = run_fixture(fixture, Run(groups, options_of(given), recorder))
    assert verdict_of(rows) == PASSED, (fixture.name, rows)
    return rows, recorder.seen.hexdigest()


def run_all(groups, names, given, may_be_empty=False):
    """Every fixture must pass, every output with something compared on some rank; digests of this rank's outputs."""
    digests = {}
    for name in names:
        rows, digests[name] = passed(BY_NAME[name], groups, given)
        assert may_be_empty or all(row.compared for row in rows), (name, rows)
    return digests
