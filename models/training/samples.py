"""Feature samples: what one has to hold, and a micro-batch of them (training.md 7.1).

Letters: B samples, S positions, F features (the captured layers side by side), H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .anchors import candidates

IDS, MASK, FEATURES, TEACHER, DOCUMENTS = (
    "input_ids",
    "loss_mask",
    "hidden_states",
    "target_last_hidden_states",
    "document_ids",
)
PADDED_DOCUMENT = -1


@dataclass(frozen=True)
class FeatureShape:
    """What the features of a run look like, so that a rank without samples can stand in for one.

    features: width F of `hidden_states`; hidden: width H of `target_last_hidden_states`; teacher: whether samples
    have the latter; dtype: of both.
    """

    features: int
    hidden: int
    teacher: bool = True
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("features", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed: 1 or more")


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the host. Token tensors are padded at the right, features are as long as their samples.

    input_ids_BS int64; loss_mask_BS bool, False in the padding; documents_BS int64, equal numbers side by side are
    one document, -1 in the padding; features B x [S, F] and teacher B x [S, H] (None: samples have none), which are
    read at the rows that anchors need and nowhere else, so they may be views of a file.
    """

    input_ids_BS: Tensor
    loss_mask_BS: Tensor
    documents_BS: Tensor
    features: tuple[Tensor, ...]
    teacher: tuple[Tensor, ...] | None
    shape: FeatureShape


def validate_sample(
    sample: Mapping[str, Tensor], shape: FeatureShape, rule: str = "both", name: str = "sample"
) -> None:
    """ValueError that names `name` and the field if a sample cannot be trained on.

    A sample holds input_ids [1, S] int, loss_mask [1, S] bool or 0/1, hidden_states [1, S, F] and, where the shape
    says so, target_last_hidden_states [1, S, H]; document_ids [1, S] may say which document a token is of. It needs
    a place for an anchor under `rule` (`anchors.candidates`). Look at all samples before the first step: an error on
    one rank alone leaves the others waiting.
    """
    wanted = (IDS, MASK, FEATURES) + ((TEACHER,) if shape.teacher else ())
    if missing := [key for key in wanted if key not in sample]:
        raise ValueError(f"{name} has no {', '.join(missing)}; it has {sorted(sample)}, needed: {list(wanted)}")
    ids = sample[IDS]
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"input_ids of {name} is {ids.dtype} {list(ids.shape)}, allowed: int32 or int64 [1, S]")
    length = ids.shape[1]
    widths = {MASK: (), FEATURES: (shape.features,), TEACHER: (shape.hidden,), DOCUMENTS: ()}
    for key, width in widths.items():
        if key in sample and (key != TEACHER or shape.teacher) and sample[key].shape != (1, length, *width):
            raise ValueError(f"{key} of {name} is {list(sample[key].shape)}, needed: {[1, length, *width]}")
    mask = sample[MASK]
    if mask.dtype not in (torch.bool, torch.uint8) or (mask.dtype == torch.uint8 and bool((mask > 1).any())):
        raise ValueError(f"loss_mask of {name} is {mask.dtype}, allowed: bool, or uint8 of 0 and 1")
    if not bool(candidates(mask.bool(), _documents(sample), rule).any()):
        what = "no two supervised tokens side by side" if rule == "both" else "no supervised token after its first"
        raise ValueError(f"loss_mask of {name} has {what} in one document, so it has no place for an anchor")


def collate(samples: Sequence[Mapping[str, Tensor]], shape: FeatureShape) -> Batch:
    """Samples of any lengths, also none at all, as a micro-batch: padded with zeros, with False and with -1."""
    longest = max((sample[IDS].shape[1] for sample in samples), default=1)
    ids_BS = torch.zeros(len(samples), longest, dtype=torch.int64)
    mask_BS = torch.zeros(len(samples), longest, dtype=torch.bool)
    documents_BS = torch.full((len(samples), longest), PADDED_DOCUMENT, dtype=torch.int64)
    for row, sample in enumerate(samples):
        length = sample[IDS].shape[1]
        ids_BS[row, :length] = sample[IDS][0]
        mask_BS[row, :length] = sample[MASK][0].bool()
        documents_BS[row, :length] = _documents(sample)[0]
    teacher = tuple(sample[TEACHER][0] for sample in samples) if shape.teacher else None
    return Batch(ids_BS, mask_BS, documents_BS, tuple(sample[FEATURES][0] for sample in samples), teacher, shape)


def _documents(sample: Mapping[str, Tensor]) -> Tensor:
    return sample[DOCUMENTS].long() if DOCUMENTS in sample else torch.zeros_like(sample[IDS], dtype=torch.int64)
