"""Where results go: JSON for machines, tables for people."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from .flags import STANDARD_OUTPUT

SCHEMA = 1


def people(json_target: str | None) -> TextIO:
    """The stream for text and tables: standard output, unless JSON goes there."""
    return sys.stderr if json_target == STANDARD_OUTPUT else sys.stdout


def write_json(json_target: str | None, data: Mapping[str, Any]) -> None:
    """Write {"schema": 1, **data} where --json says; nothing without the flag. ValueError if that fails."""
    if json_target is None:
        return
    text = json.dumps({"schema": SCHEMA, **data}, indent=2) + "\n"
    try:
        if json_target == STANDARD_OUTPUT:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            Path(json_target).write_text(text, encoding="utf-8")
    except BrokenPipeError:
        # A reader that has gone is no fault of the flag.
        raise
    except OSError as problem:
        raise ValueError(f"--json is {json_target!r}, which could not be written: {problem}") from problem


def show(stream: TextIO, *tables: Table) -> None:
    """Print tables."""
    # Off a terminal rich would cut lines at 80 columns.
    console = Console(file=stream, width=None if stream.isatty() else 160, highlight=False)
    for table in tables:
        console.print(table)
    stream.flush()


def two_columns(title: str, rows: Mapping[str, str]) -> Table:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table
