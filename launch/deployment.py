"""Deployment points: all settings of one as frozen data, and what becomes of them where a flag stands beside."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

from rich.table import Table
from rich.text import Text

from .output import show

Setting = str | int


@dataclass(frozen=True)
class Deployment:
    """One point. batch, prefill_rows and verify_rows are per tensor group, verify_rows of each request: one token and
    its drafts."""

    name: str
    preset: str
    numerics: str
    ranks: int
    tp: int
    ep: int
    context: int
    block_size: int
    batch: int
    verify_rows: int
    prefill_rows: int
    speculative: str

    def settings(self) -> dict[str, Setting]:
        """Everything but the name, by flag."""
        return {name: value for name, value in asdict(self).items() if name != "name"}

    @property
    def gamma(self) -> int:
        """Drafts of a request."""
        return self.verify_rows - 1


FLASH_DSPARK_16 = Deployment(
    name="flash-dspark-16",
    preset="flash-dspark",
    numerics="w8a8",
    ranks=16,
    tp=4,
    ep=16,
    context=1 << 20,
    block_size=32,
    batch=64,
    verify_rows=8,
    prefill_rows=512,
    speculative="dspark",
)
DEPLOYMENTS = {FLASH_DSPARK_16.name: FLASH_DSPARK_16}


@dataclass(frozen=True)
class Row:
    """One setting: what the point says, what a flag says (None: no such flag), and which of them holds."""

    name: str
    point: Setting | None
    flag: Setting | None
    used: Setting


def deployment(name: str) -> Deployment:
    """The point of this name. ValueError."""
    if name not in DEPLOYMENTS:
        raise ValueError(f"--deployment is {name!r}, allowed: {', '.join(DEPLOYMENTS)}")
    return DEPLOYMENTS[name]


def combine(point: Deployment, given: Mapping[str, Setting | None]) -> tuple[Row, ...]:
    """Every setting of a point beside the flags that were given (None: not given). A flag wins."""
    rows = []
    for name, value in point.settings().items():
        flag = given.get(name)
        rows.append(Row(name, value, flag, value if flag is None else flag))
    return tuple(rows)


def parse_with_point(
    make_parser: Callable[[], ArgumentParser], argv: Sequence[str]
) -> tuple[Namespace, tuple[Row, ...]]:
    """The flags of a verb that takes --deployment, and the settings of the point that are flags there; no rows if no
    point is named. What no flag says, the point says; ranks follow from ep, or from torchrun; the number of drafts is
    the point's if the drafter is."""
    args = make_parser().parse_args(argv)
    if args.deployment is None:
        return args, ()
    point = deployment(args.deployment)
    settings = {name: value for name, value in point.settings().items() if name != "ranks" and hasattr(args, name)}
    blank, filled = make_parser(), make_parser()
    blank.set_defaults(**dict.fromkeys(settings))
    filled.set_defaults(**settings)
    given = vars(blank.parse_args(argv))
    rows = [row for row in combine(point, {name: given[name] for name in settings}) if row.name in settings]
    args = filled.parse_args(argv)
    if args.speculative == point.speculative:
        rows.append(Row("gamma", point.gamma, args.gamma, point.gamma if args.gamma is None else args.gamma))
        args.gamma = rows[-1].used
    return args, tuple(rows)


def table(point: Deployment, rows: tuple[Row, ...]) -> Table:
    """Both values of every setting."""
    title = Text(f"deployment {point.name}, requests and rows per tensor group", no_wrap=True, overflow="ignore")
    shown = Table(title=title, title_justify="left")
    for heading in ("setting", "point", "flag", "used"):
        shown.add_column(heading, justify="left" if heading == "setting" else "right")
    for row in rows:
        flag = "" if row.flag is None else str(row.flag)
        shown.add_row(f"--{row.name.replace('_', '-')}", str(row.point), flag, str(row.used))
    return shown


def show_point(stream: TextIO, name: str, rows: tuple[Row, ...]) -> None:
    """Print the settings of a point beside the flags that won over them."""
    show(stream, table(deployment(name), rows))
