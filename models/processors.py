"""What may change a row's logits before its token is chosen: masks of a grammar, penalties, an end token not wanted.

Each row is processed with the tokens that it follows: those of its request, then the drafts before it, which may turn
out wrong. So a verification, and the drafter that proposes for it, treat a row just as plain decoding would.
Letters: N rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .request import SamplingParams
from .sampling import finite_rows


@dataclass(frozen=True)
class RowHistory:
    """What a row of logits follows: known tokens of its request, prompt included, then supposed ones."""

    params: SamplingParams
    tokens: Sequence[int]
    supposed: tuple[int, ...] = ()


class Processor(Protocol):
    """Changes rows of logits."""

    def wanted(self, params: SamplingParams) -> bool:
        """Whether it has anything to do with requests of these parameters. Rows of others are not given to it."""

    def __call__(self, logits_NV: torch.Tensor, rows: Sequence[RowHistory]) -> torch.Tensor:
        """New logits [N, V]; a token that must not come gets `banned`. Each row depends on its own history only."""


def banned(dtype: torch.dtype) -> float:
    """The logit of a token that must not come: finite, for infinity marks a broken row, and of probability 0."""
    return torch.finfo(dtype).min


class IgnoreEos:
    """The end token never comes."""

    def wanted(self, params: SamplingParams) -> bool:
        """Where a request has an end token and does not want it."""
        return params.ignore_eos and params.eos_id is not None

    def __call__(self, logits_NV: torch.Tensor, rows: Sequence[RowHistory]) -> torch.Tensor:
        """The end token of each row banned."""
        eos_N = torch.tensor([row.params.eos_id for row in rows], device=logits_NV.device)
        return logits_NV.scatter(1, eos_N[:, None], banned(logits_NV.dtype))


def process(logits_NV: torch.Tensor, rows: Sequence[RowHistory], processors: Sequence[Processor]) -> torch.Tensor:
    """Logits after all processors, in their order. Rows that are not finite stay as they are: nothing hides them."""
    for processor in processors:
        chosen = [number for number, row in enumerate(rows) if processor.wanted(row.params)]
        if not chosen:
            continue
        index_C = torch.tensor(chosen, device=logits_NV.device)
        before_CV = logits_NV[index_C]
        after_CV = processor(before_CV, [rows[number] for number in chosen])
        sound_C1 = finite_rows(before_CV)[:, None]
        logits_NV = logits_NV.index_copy(0, index_C, torch.where(sound_C1, after_CV, before_CV))
    return logits_NV
