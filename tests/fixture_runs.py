"""How tests of stage and composition fixtures run them."""

from meshspark.launch.fixtures.harness import Options, Run, run_fixture

SMALL = {"start_pos": (0, 127, 251), "chunk": (9, 1, 6)}
"""A prompt's beginning, a decode row at a boundary of everything, a chunk over boundaries on a resident prefix."""


def options_of(given):
    """Options from plain data, whose tuples have become lists."""
    return Options(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})


def passed(fixture, groups, given):
    """The rows of a fixture, all of which must have passed."""
    rows = run_fixture(fixture, Run(groups, options_of(given)))
    assert all(row.verdict == "passed" for row in rows), (fixture.name, rows)
    return rows
