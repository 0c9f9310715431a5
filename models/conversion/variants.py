"""The official drafters: which tensors mtp.* of each has, and how a folder shows which it is. training.md 8.2.

Variants of DSpark are V4's and V4.1's; V4's plain MTP layer is a kind of its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint.draft_kind import KINDS, SHOWN
from ..checkpoint.names import TensorSpec, draft_table
from ..checkpoint.reader import CheckpointError, few
from ..v4.config import V4Config

PREFIX = "mtp."
GATE_BIAS, IMAGE_BIAS = ".ffn.gate.bias", ".ffn.gate.bias_vl"
"""Ends of the names of a routing bias, and of V4.1's second one, for image tokens."""

_MARKOV = (".markov_head.markov_w1.weight", ".markov_head.markov_w2.weight")


@dataclass(frozen=True)
class Variant:
    """What one official drafter has that the others have not.

    block: rows and columns that share an FP8 scale. markov: ends of the names of the two Markov tables. marks: ends of
    names that the other variant lacks. drafter: the kind of draft_kind.py that its tensors are of.
    """

    name: str
    title: str
    block: int
    markov: tuple[str, str]
    has_readout: bool
    has_image_bias: bool
    attention_mode: str
    pre_from_prev: bool
    marks: tuple[str, ...]
    drafter: str = "dspark"


VARIANTS = {
    "v4": Variant(
        name="v4",
        title="V4",
        block=128,
        markov=_MARKOV,
        has_readout=True,
        has_image_bias=False,
        attention_mode="deepseek_v4",
        pre_from_prev=False,
        marks=(*_MARKOV, ".hc_head_fn", ".hc_head_base", ".hc_head_scale"),
    ),
    "v41": Variant(
        name="v41",
        title="V4.1",
        block=32,
        markov=(".markov_head.embed.weight", ".markov_head.head.weight"),
        has_readout=False,
        has_image_bias=True,
        attention_mode="deepseek_v41",
        pre_from_prev=True,
        marks=(".markov_head.embed.weight", ".markov_head.head.weight", IMAGE_BIAS),
    ),
}
"""Name, as --variant takes it -> the variant."""

MTP = replace(
    VARIANTS["v4"],
    name="mtp",
    title="MTP",
    marks=(".e_proj.weight", ".h_proj.weight", ".enorm.weight", ".hnorm.weight"),
    drafter="mtp",
)
"""V4's single MTP layer, model.md 7."""


def variant_of(name: str) -> Variant:
    """The variant of this name. ValueError naming those that there are."""
    if name not in VARIANTS:
        raise ValueError(f"variant is {name!r}, allowed: {', '.join(VARIANTS)}")
    return VARIANTS[name]


def official_table(variant: Variant, shape: V4Config) -> tuple[TensorSpec, ...]:
    """Every official weight of the variant's drafter in the shape's sizes, stage after stage.

    As in the name table of the checkpoints, scales have no entry of their own.
    """
    return tuple(_varied(variant, draft_table(shape)))


def plain_table(table: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The table with BF16 in place of codes and scales."""
    return tuple(
        spec
        if spec.quant is None
        else replace(spec, dtype="BF16", stored_shape=spec.shape, scale_name=None, scale_shape=None, quant=None)
        for spec in table
    )


def count_files(table: Iterable[TensorSpec]) -> int:
    """Stored tensors of a table, scales included."""
    return sum(1 if spec.scale_name is None else 2 for spec in table)


def check_variant(variant: Variant, names: Iterable[str], folder: Path) -> None:
    """CheckpointError where tensors of these names are no drafter of the variant's kind, or are one of another variant.

    Whether they are whole is left to the comparison with the table.
    """
    drafter, kind = [name for name in names if name.startswith(PREFIX)], variant.drafter
    if not drafter:
        raise CheckpointError(f"{folder}: names no tensor {PREFIX}*, allowed: a checkpoint with {SHOWN[kind]}")
    found = {each: [name for name in drafter if any(mark in name for mark in marks)] for each, marks in KINDS.items()}
    for other in (name for name in KINDS if name != kind and found[name] and not found[kind]):
        raise CheckpointError(
            f"{folder}: mtp.* is {SHOWN[other]} by its tensors ({few(found[other])}), allowed: {SHOWN[kind]}"
        )
    if kind != "dspark":
        return
    marked = {each.name: [name for name in drafter if name.endswith(each.marks)] for each in VARIANTS.values()}
    others = [each for each in VARIANTS.values() if each != variant and marked[each.name]]
    if others and not marked[variant.name]:
        first = others[0]
        raise CheckpointError(
            f"{folder}: mtp.* is a {first.title} drafter by its tensors ({few(marked[first.name])}), but the variant "
            f"is {variant.name}; allowed: {first.name}"
        )


def tell_variant(names: Iterable[str], folder: Path) -> Variant:
    """The variant that official names show. CheckpointError where they show none, or both."""
    drafter = [name for name in names if name.startswith(PREFIX)]
    if any(name.endswith(MTP.marks) for name in drafter) and not any(m in n for n in drafter for m in KINDS["dspark"]):
        return MTP
    shown = [each for each in VARIANTS.values() if any(name.endswith(each.marks) for name in drafter)]
    if len(shown) != 1:
        what = "of both variants" if shown else "of no variant"
        raise CheckpointError(
            f"{folder}: mtp.* has marks {what}, allowed: a DSpark drafter of V4 or of V4.1, or a plain MTP layer"
        )
    return shown[0]


def _varied(variant: Variant, table: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
    for spec in table:
        if ".hc_head_" in spec.name and not variant.has_readout:
            continue
        for usual, name in zip(_MARKOV, variant.markov, strict=True):
            if spec.name.endswith(usual):
                spec = replace(spec, name=spec.name.removesuffix(usual) + name)
        yield spec
        if spec.name.endswith(GATE_BIAS) and variant.has_image_bias:
            yield replace(spec, name=spec.name.removesuffix(GATE_BIAS) + IMAGE_BIAS)
