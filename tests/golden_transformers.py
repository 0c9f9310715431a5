"""Golden values of the target: transformers' DeepseekV4ForCausalLM with our weights, FP32, eager."""

import os
from collections.abc import Sequence

import pytest
import torch

from meshspark.benchmarks.peer import peer_model as golden_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", minversion="5.24")


@torch.no_grad()
def golden_logits(net: torch.nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    """FP32 logits [S, V] of one sequence in one go."""
    return net(torch.tensor([list(tokens)]), use_cache=False).logits[0]


@torch.no_grad()
def golden_generate(net: torch.nn.Module, prompt: Sequence[int], n: int) -> list[int]:
    """n greedy tokens after the prompt, through the peer's own cache."""
    step, cache, out = torch.tensor([list(prompt)]), None, []
    for _ in range(n):
        answer = net(step, cache=cache, use_cache=True)
        cache = answer.cache
        step = answer.logits[:, -1:].argmax(-1)
        out.append(int(step))
    return out


__all__ = ["golden_generate", "golden_logits", "golden_model"]
