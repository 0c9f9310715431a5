"""ObjectiveConfig: what a draft learns, at which anchors and with which weights (training.md 7)."""

import math
from dataclasses import dataclass

from .anchors import RULES
from .blocks import check_block


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is learned. Every field but chunk_blocks belongs to the contract of a run that is resumed.

    block_size b, mask_token_id of all offsets but the first; up to num_anchors blocks a sample under anchor_rule;
    weight exp(-j / loss_decay_gamma) of offset j (None: 1); the terms' factors; how many blocks of every document go
    through the head at once (0: all, nothing is computed twice).
    """

    block_size: int
    mask_token_id: int
    num_anchors: int = 512
    anchor_rule: str = "both"
    loss_decay_gamma: float | None = 4.0
    ce_loss_alpha: float = 0.1
    l1_loss_alpha: float = 0.9
    confidence_head_alpha: float = 1.0
    chunk_blocks: int = 128

    def __post_init__(self) -> None:
        check_block(self.block_size, self.mask_token_id, self.loss_decay_gamma)
        if self.num_anchors < 1:
            raise ValueError(f"num_anchors is {self.num_anchors}, allowed: 1 or more")
        if self.anchor_rule not in RULES:
            raise ValueError(f"anchor_rule is {self.anchor_rule!r}, allowed: {', '.join(RULES)}")
        if self.chunk_blocks < 0:
            raise ValueError(f"chunk_blocks is {self.chunk_blocks}, allowed: 0 for one call, or more")
        names = ("ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha")
        for name in names:
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} is {getattr(self, name)}, allowed: a finite number from 0")
        if not any(getattr(self, name) for name in names):
            raise ValueError(f"{', '.join(names)} are all 0: nothing would be learned")

    @property
    def needs_teacher(self) -> bool:
        """Whether a term compares with the target's distribution."""
        return self.l1_loss_alpha > 0 or self.confidence_head_alpha > 0
