"""The objective of drafts: cross entropy, L1 distance to the target and confidence, training.md 7.4 and 7.5.

Letters: D packed documents, N blocks, b offsets of a block, Q = N * b, P context rows, F features, H hidden,
V vocabulary (or a rank's shard of it), r the Markov rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .chunked import checkpointed_chunk_reduce
from .config import ObjectiveConfig
from .hooks import StepOutput
from .metrics import acceptance, term_metrics
from .packing import DraftBatch
from .terms import VocabularyShard, copy_to_shards, shard_rows, vocabulary_terms


class MarkovHead(Protocol):
    """What the objective asks of a draft's Markov head (models/drafts/heads.py)."""

    markov_w2: nn.Linear

    def embedding(self, previous_b: Tensor) -> Tensor:
        """Rows [..., b, r] of the tokens before."""

    def latent(self, previous_b: Tensor, hidden_bH: Tensor) -> Tensor:
        """[..., b, r], which markov_w2 [V, r] is multiplied with."""


@dataclass(frozen=True)
class TargetTables:
    """The target's frozen embedding [V, H], whole on every rank, and head [V, H] or this rank's shard of its rows."""

    embedding_VH: Tensor
    head_VH: Tensor
    shard: VocabularyShard = VocabularyShard()  # noqa: RUF009


class Objective:
    """Turns a packed micro-batch into numerator, denominator and metrics.

    draft: a DSparkDraft or what a placement made of one, called as draft(noise_DQH, features_DPF, anchors_DN, keep_DN);
    with reads_next an MtpDraft, called with the embedded tokens behind the context rows in the place of the noise.
    Its heads are taken from `heads`, the unwrapped module (default: draft itself): attributes markov_head and
    confidence_head, either may be None. They run outside of the draft's forward, so they belong to the root unit
    where parameters are sharded. Captured features, teacher states and the target's tables get no gradient. dtype:
    what the draft's inputs are cast to, None to leave them as they are.
    """

    def __init__(
        self,
        draft: Callable[..., Any],
        target: TargetTables,
        config: ObjectiveConfig,
        heads: nn.Module | None = None,
        dtype: torch.dtype | None = None,
        *,
        reads_next: bool = False,
    ) -> None:
        self.draft, self.target, self.config, self.dtype = draft, target, config, dtype
        self.reads_next = reads_next
        module: Any = draft if heads is None else heads
        self.markov: MarkovHead | None = module.markov_head
        self.confidence: Callable[..., Tensor] | None = module.confidence_head
        if config.confidence_head_alpha > 0 and self.confidence is None:
            raise ValueError(
                f"confidence_head_alpha is {config.confidence_head_alpha}, but the draft has no confidence head; "
                "set it to 0, or enable_confidence_head in the draft's config"
            )

    def __call__(self, batch: DraftBatch) -> StepOutput:
        """The objective of one micro-batch. ValueError where a term lacks the teacher's states."""
        config = self.config
        if config.needs_teacher and batch.teacher_DNbH is None:
            raise ValueError(
                f"l1_loss_alpha is {config.l1_loss_alpha} and confidence_head_alpha {config.confidence_head_alpha}, "
                "which need target_last_hidden_states; the samples have none"
            )
        blocks = batch.blocks
        with torch.no_grad():
            ids = batch.next_ids_DP if self.reads_next else blocks.noise_ids.flatten(1)
            tokens = F.embedding(ids, self.target.embedding_VH)
        tokens, features = (x.to(self.dtype or x.dtype) for x in (tokens, batch.features_DPF.detach()))
        out = self.draft(tokens, features, batch.anchors_DN, batch.keep_DN)
        shape = (*blocks.labels.shape, -1)
        names: list[str] = []
        sums = checkpointed_chunk_reduce(
            lambda *slices: self._sums(names, *slices),
            out.hidden_BQH.view(shape),
            out.readout_BQH.view(shape),
            blocks.labels,
            blocks.previous,
            blocks.eval_mask,
            blocks.weights,
            batch.teacher_DNbH,
            chunk_size=config.chunk_blocks,
            dim=1,
        )
        numerator, pairs = sums[0], dict(zip(names, zip(sums[1::2], sums[2::2], strict=True), strict=True))
        denominator = blocks.weights.sum().to(numerator.dtype)
        # Without any weight the numerator is 0, and so is the mean.
        loss = numerator / denominator.where(denominator > 0, 1.0)
        return StepOutput(loss, (numerator, denominator), pairs | _anchor_metrics(batch))

    def _sums(
        self,
        names: list[str],
        hidden: Tensor,
        readout: Tensor,
        labels: Tensor,
        previous: Tensor,
        eval_mask: Tensor,
        weights: Tensor,
        teacher: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """The numerator and the metrics' numerators and denominators of some blocks; their names go into `names`."""
        config, target = self.config, self.target
        logits = self._logits(hidden, previous)
        taught = None
        if teacher is not None:
            with torch.no_grad():
                taught = F.linear(teacher.to(target.head_VH.dtype), target.head_VH)
        terms = vocabulary_terms(logits, labels, taught, target.shard)
        total = config.ce_loss_alpha * terms.ce_R
        if terms.l1_R is not None:
            total = total + config.l1_loss_alpha * terms.l1_R
        sure = missed = None
        if config.confidence_head_alpha > 0:
            assert self.confidence is not None and terms.l1_R is not None, "checked before"
            row = None if self.markov is None else self.markov.embedding(previous)
            sure = self.confidence(hidden, readout, row)
            missed = F.binary_cross_entropy_with_logits(
                sure, acceptance(terms.l1_R.detach()).to(sure.dtype), reduction="none"
            )
            total = total + config.confidence_head_alpha * missed
        # Chosen rather than multiplied by 0: an infinite term of a row that is not learned does not count.
        numerator = (total.where(eval_mask, 0.0) * weights).sum()
        pairs = term_metrics(terms, labels, eval_mask, weights, sure, missed)
        names[:] = pairs
        return (numerator, *(part for pair in pairs.values() for part in pair))

    def _logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """The draft's logits [D, N, b, V] in FP32 or wider: the target's head and the Markov term, summed there."""
        target = self.target
        head_VH = target.head_VH.detach()
        logits = F.linear(copy_to_shards(hidden, target.shard).to(head_VH.dtype), head_VH)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.markov is None:
            return logits
        latent = copy_to_shards(self.markov.latent(previous, hidden), target.shard)
        rows_Vr = shard_rows(self.markov.markov_w2.weight, head_VH.shape[0], target.shard)
        return logits + F.linear(latent.to(rows_Vr.dtype), rows_Vr)


def _anchor_metrics(batch: DraftBatch) -> dict[str, tuple[Tensor, Tensor]]:
    """Blocks and candidates a sample; how many of the kept blocks learn anything."""
    kept = batch.keep_DN.sum().to(torch.float32)
    learned = batch.blocks.eval_mask[..., 0].sum().to(torch.float32)
    samples = torch.tensor(float(batch.samples))
    return {
        "anchors": (kept, samples),
        "anchor_candidates": (torch.tensor(float(batch.candidates)), samples),
        "anchors_learned": (learned, kept),
    }
