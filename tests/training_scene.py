"""A small draft with the interface of DSparkDraft, samples with gaps and documents, and plain loops as oracles.

Legend: B rows, N blocks, b offsets, Q = N * b, P context rows, F features, H hidden, V vocabulary, r Markov rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshspark.models.training.anchors import sample_generator
from meshspark.models.training.config import ObjectiveConfig
from meshspark.models.training.objective import Objective, TargetTables
from meshspark.models.training.packing import DraftBatch
from meshspark.models.training.prepare import draft_batch
from meshspark.models.training.samples import FeatureShape, collate
from meshspark.models.training.terms import VocabularyShard

HIDDEN, FEATURES, VOCABULARY, RANK, BLOCK, WINDOW, MASK_ID = 6, 10, 13, 3, 3, 4, 12
SHAPE = FeatureShape(FEATURES, HIDDEN, dtype=torch.float64)
CONFIG = ObjectiveConfig(BLOCK, MASK_ID, num_anchors=8, chunk_blocks=2)


@dataclass(frozen=True)
class Out:
    hidden_BQH: Tensor
    readout_BQH: Tensor


class Markov(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(VOCABULARY, RANK)
        self.markov_w2 = nn.Linear(RANK, VOCABULARY, bias=False)

    def embedding(self, previous: Tensor) -> Tensor:
        return self.markov_w1(previous)

    def latent(self, previous: Tensor, hidden: Tensor) -> Tensor:
        return self.embedding(previous)


class Confidence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN + RANK, 1, bias=False)

    def forward(self, hidden: Tensor, readout: Tensor, row: Tensor) -> Tensor:
        return self.proj(torch.cat([readout, row], -1))[..., 0]


class SmallDraft(nn.Module):
    """Attention with a bias of the distance to the anchor over `window` context rows and over the own block."""

    def __init__(self, window: int | None = WINDOW, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.window = window
        self.fc = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.slope = nn.Parameter(torch.ones(()))
        self.markov_head = Markov()
        self.confidence_head = Confidence()
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.4

    def forward(self, noise_BQH: Tensor, features_BPF: Tensor, anchors_BN: Tensor, keep_BN: Tensor) -> Out:
        context = self.fc(features_BPF)
        rows = torch.arange(context.shape[1], device=context.device)
        behind = anchors_BN[..., None] - rows
        seen = (behind > 0) & keep_BN[..., None]
        if self.window is not None:
            seen &= behind <= self.window
        noise = noise_BQH.view(*anchors_BN.shape, -1, noise_BQH.shape[-1])
        scores = torch.einsum("bnjh,bph->bnjp", noise, context) - self.slope * behind[:, :, None] * 0.3
        scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
        sink = torch.zeros_like(scores[..., :1])
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        readout = torch.einsum("bnjp,bph->bnjh", weights, context) + self.mix(noise + noise.mean(2, keepdim=True))
        hidden = readout * torch.rsqrt(readout.square().mean(-1, keepdim=True) + 1e-6)
        return Out(hidden.flatten(1, 2), readout.flatten(1, 2))


def tables(dtype: torch.dtype = torch.float64, shard: VocabularyShard | None = None, size: int = VOCABULARY) -> Any:
    generator = torch.Generator().manual_seed(6)
    both = torch.randn(2, VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    shard = VocabularyShard() if shard is None else shard
    return TargetTables(both[0], both[1][shard.start : shard.start + size], shard)


def sample(number: int, length: int, documents: Sequence[int] | None = None, supervised: float = 0.7) -> dict:
    generator = torch.Generator().manual_seed(100 + number)
    mask = torch.rand(1, length, generator=generator) < supervised
    made = {
        "input_ids": torch.randint(0, VOCABULARY, (1, length), generator=generator),
        "loss_mask": mask,
        "hidden_states": torch.randn(1, length, FEATURES, generator=generator, dtype=torch.float64),
        "target_last_hidden_states": torch.randn(1, length, HIDDEN, generator=generator, dtype=torch.float64),
    }
    if documents is not None:
        made["document_ids"] = torch.tensor([[d for d, n in enumerate(documents) for _ in range(n)]], dtype=torch.int64)
    return made


def packed(
    samples: Sequence[dict], config: ObjectiveConfig = CONFIG, window: int | None = WINDOW, first: int = 0
) -> DraftBatch:
    """The samples' packed batch; anchors are drawn by the sample's number, counted from `first`."""
    generators = [sample_generator(1, 0, first + n) for n in range(len(samples))]
    return draft_batch(collate(samples, SHAPE), config, window, generators, torch.float64)


def objective(draft: nn.Module, config: ObjectiveConfig = CONFIG) -> Objective:
    return Objective(draft, tables(), config)


def gradients(draft: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in draft.named_parameters()}


def clipped(parameters: Sequence[nn.Parameter], clip: float | None) -> float:
    """The norm of all gradients, which are scaled to `clip` where it is above."""
    norm = float(sum(p.grad.square().sum() for p in parameters if p.grad is not None)) ** 0.5
    for parameter in parameters:
        if parameter.grad is not None and clip is not None and norm > clip:
            parameter.grad *= clip / norm
    return norm
