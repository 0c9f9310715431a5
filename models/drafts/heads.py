"""Heads of a draft's readout: the term that the token before adds to its logits, and its confidence.

Legend: "..." any leading shape (samples, blocks), b rows of a block, H hidden, V vocabulary, r the Markov rank.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..functions import cast
from .config import DraftConfig
from .residual import full_precision
from .wide import wide_dtype


class MarkovHead(nn.Module):
    """Kind vanilla: the term is markov_w2 times the token's row of markov_w1, both [V, r].

    The other kinds make another latent of that row; what follows the latent is shared, so that whoever holds a slice of
    markov_w2 can multiply the latents with it.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.rank = config.dflash.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)
        self.markov_w2 = nn.Linear(self.rank, config.vocab_size, bias=False)

    def embedding(self, previous_b: torch.Tensor) -> torch.Tensor:
        """Rows of markov_w1 [..., b, r] of the tokens before, int64 [..., b]."""
        return self.markov_w1(previous_b)

    def latent(self, previous_b: torch.Tensor, hidden_bH: torch.Tensor) -> torch.Tensor:
        """[..., b, r] of the tokens before [..., b] and the block's rows [..., b, H] after the final norm."""
        return self.embedding(previous_b)

    def step(
        self, previous: torch.Tensor, hidden_H: torch.Tensor, state_r: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(latent [..., r], state) of one row of a block, given the state of the row before it (None at the first):
        row after row gives what `latent` gives of the whole block. Only kind rnn has a state."""
        return self.latent(previous.unsqueeze(-1), hidden_H.unsqueeze(-2)).squeeze(-2), None

    def forward(self, previous_b: torch.Tensor, hidden_bH: torch.Tensor) -> torch.Tensor:
        """Terms [..., b, V] in the compute dtype; whoever adds them to logits adds in FP32."""
        return self.markov_w2(self.latent(previous_b, hidden_bH))

    def reset_parameters(self, std: float) -> None:
        """markov_w1 normal(0, std), markov_w2 zero: a fresh head adds nothing."""
        nn.init.normal_(self.markov_w1.weight, std=std)
        nn.init.zeros_(self.markov_w2.weight)


class GatedMarkovHead(MarkovHead):
    """Kind gated: a sigmoid of the block's row and the token's row gates the latter. gate [r, H + r]."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.gate = nn.Linear(config.hidden_size + self.rank, self.rank, bias=False)

    def latent(self, previous_b: torch.Tensor, hidden_bH: torch.Tensor) -> torch.Tensor:
        row_br = self.embedding(previous_b)
        return torch.sigmoid(self.gate(torch.cat((cast(hidden_bH, row_br.dtype), row_br), dim=-1))) * row_br

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        nn.init.normal_(self.gate.weight, std=std)


class RecurrentMarkovHead(MarkovHead):
    """Kind rnn: a state that starts at zero and is updated by each row of a block, from the state, the token's row and
    the block's row. joint [3r, 2r + H] makes gate, candidate and output, in that order."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.joint = nn.Linear(2 * self.rank + config.hidden_size, 3 * self.rank, bias=False)

    def latent(self, previous_b: torch.Tensor, hidden_bH: torch.Tensor) -> torch.Tensor:
        latents, state_r = [], None
        for number in range(previous_b.shape[-1]):
            latent_r, state_r = self.step(previous_b[..., number], hidden_bH[..., number, :], state_r)
            latents.append(latent_r)
        return torch.stack(latents, dim=-2)

    def step(
        self, previous: torch.Tensor, hidden_H: torch.Tensor, state_r: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        row_r = self.embedding(previous)
        state_r = torch.zeros_like(row_r) if state_r is None else state_r
        joint = self.joint(torch.cat((cast(state_r, row_r.dtype), row_r, cast(hidden_H, row_r.dtype)), dim=-1))
        gate_r, candidate_r, output_r = joint.chunk(3, dim=-1)
        kept_r = torch.sigmoid(gate_r)
        return torch.tanh(output_r), kept_r * state_r + (1 - kept_r) * torch.tanh(candidate_r)

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        nn.init.normal_(self.joint.weight, std=std)


class ConfidenceHead(nn.Module):
    """A logit for each draft: is it accepted, given that all before it are? proj [1, H + r], or [1, H] without the
    Markov row; training.md 6."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        dflash = config.dflash
        self.input, self.with_markov = dflash.confidence_head_input, dflash.confidence_head_with_markov
        width = config.hidden_size + (dflash.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1, bias=dflash.confidence_head_bias)

    def forward(
        self, hidden_bH: torch.Tensor, readout_bH: torch.Tensor, markov_br: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [..., b] in FP32 (or wider), projected so under autocast too.

        Of hidden (after the final norm) and readout (before it) it takes that which the config names, and markov_br,
        the rows of markov_w1 of the tokens before, where it was made with them. ValueError where they are missing.
        """
        row_bH = readout_bH if self.input == "pre_norm" else hidden_bH
        if self.with_markov and markov_br is None:
            raise ValueError("markov_br is None, allowed: rows of markov_w1, for confidence_head_with_markov is true")
        weight = self.proj.weight
        with full_precision(row_bH):
            wide = wide_dtype(torch.promote_types(row_bH.dtype, weight.dtype))
            parts = [cast(row_bH, wide)]
            if self.with_markov and markov_br is not None:
                parts.append(cast(markov_br, wide))
            bias = None if self.proj.bias is None else cast(self.proj.bias, wide)
            return F.linear(torch.cat(parts, dim=-1), cast(weight, wide), bias).squeeze(-1)

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.proj.weight, std=std)
        if self.proj.bias is not None:
            nn.init.zeros_(self.proj.bias)


def build_markov_head(config: DraftConfig) -> MarkovHead | None:
    """The head of the config's kind, None at rank 0."""
    if config.dflash.markov_rank == 0:
        return None
    kinds = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}
    return kinds[config.dflash.markov_head_type](config)


def build_confidence_head(config: DraftConfig) -> ConfidenceHead | None:
    """The head, None where the config enables none."""
    return ConfidenceHead(config) if config.dflash.enable_confidence_head else None
