"""Muon for matrices, AdamW for the rest: the optimiser of the bundled sample.

Muon steps along the orthogonal factor of a momentum, found by Newton-Schulz iterations; stacked matrices
(routed experts) are stepped one by one in a batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic x -> a x + b x^3 + c x^5 that drives singular values into a band around 1."""
ITERATIONS = 5


def orthogonal_factor(matrix: torch.Tensor) -> torch.Tensor:
    """Roughly U V^T of each matrix [..., R, C] = U S V^T."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


@dataclass
class Muon:
    """Momentum with orthogonalised steps. momentum: buffer per name, kept here; lr in units of spectral norm."""

    parameters: Mapping[str, torch.Tensor]
    beta: float = 0.95
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        self.momentum = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step on every parameter that has a gradient. Mutates parameters and momenta."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            momentum = self.momentum[name].lerp_(parameter.grad, 1 - self.beta)
            update = orthogonal_factor(parameter.grad.lerp(momentum, self.beta))
            scale = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
            parameter.mul_(1 - lr * self.weight_decay).add_(update, alpha=-lr * scale)


@dataclass
class Adam:
    """Adam with one learning rate per parameter, relative to the step's."""

    parameters: Mapping[str, torch.Tensor]
    rates: Mapping[str, float]
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.steps = 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step on every parameter that has a gradient. Mutates parameters and moments."""
        self.steps += 1
        b1, b2 = self.betas
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            first = self.first[name].lerp_(parameter.grad, 1 - b1)
            second = self.second[name].lerp_(parameter.grad.square(), 1 - b2)
            unbiased = (second / (1 - b2**self.steps)).sqrt_().add_(self.eps)
            parameter.addcdiv_(first / (1 - b1**self.steps), unbiased, value=-lr * self.rates[name])
