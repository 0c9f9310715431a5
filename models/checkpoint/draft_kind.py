"""What the mtp.* tensors of a checkpoint are: a DSpark drafter's stages, or a plain MTP layer."""

from collections.abc import Iterable
from pathlib import Path

from ..v4.config import V4Config
from .reader import CheckpointError, few

KINDS = {
    "dspark": (".main_proj.", ".main_norm.", ".markov_head.", ".confidence_head."),
    "mtp": (".e_proj.", ".h_proj.", ".enorm.", ".hnorm."),
}
"""Marks in the names of tensors that one kind has and the other has not."""

SHOWN = {"dspark": "a DSpark drafter", "mtp": "a plain MTP layer"}


def check_drafter(config: V4Config, names: Iterable[str], folder: Path) -> None:
    """CheckpointError where tensors of both kinds are mixed, or are of the other kind than the config says.

    The names tell the kind. That a kind is whole is left to the comparison with the name table.
    """
    found = {kind: [name for name in names if _has(name, marks)] for kind, marks in KINDS.items()}
    kinds = [kind for kind, of_kind in found.items() if of_kind]
    if not kinds:
        return
    if len(kinds) > 1:
        raise CheckpointError(
            f"{folder}: mtp.* is neither {SHOWN['dspark']} nor {SHOWN['mtp']}: it has {few(found['dspark'])}, "
            f"but also {few(found['mtp'])}"
        )
    kind = kinds[0]
    if kind != config.drafter and config.drafter != "none":
        keys = "lacks the dspark_* keys" if kind == "dspark" else "has dspark_* keys"
        raise CheckpointError(
            f"{folder}: mtp.* is {SHOWN[kind]} by its tensors ({few(found[kind])}), but config.json {keys}"
        )


def _has(name: str, marks: tuple[str, ...]) -> bool:
    return name.startswith("mtp.") and any(mark in name for mark in marks)
