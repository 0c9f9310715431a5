"""Training of the bundled sample through the project's own forward, with checkpoints of its own."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from ..models.checkpoint.names import held_table
from ..models.numerics import FLOAT32
from ..models.optimiser import Adam, Muon
from ..models.v4.config import V4Config
from ..models.v4.model import Model
from ..models.v4.quant import fake_quantise
from ..parallel.groups import Groups

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainSettings:
    """minutes: budget of time over all runs, after which the schedule is complete. batch: sequences x length.

    Every long_every-th step takes one sequence of the same number of tokens. quantised_share: last part of the
    run in which weights pass through the storage formats.
    """

    minutes: float = 60.0
    sequences: int = 4
    length: int = 512
    long_every: int = 8
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    warm_up_steps: int = 20
    decay_share: float = 0.6
    quantised_share: float = 0.15
    balance_rate: float = 0.002
    clip_norm: float = 1.0
    seed: int = 1


def initial_weights(config: V4Config, seed: int) -> Weights:
    """Float weights at the start: outputs of sub-layers near zero, streams mixed near the identity."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, specs in held_table(config).items():
        shape = (len(specs), *specs[0].shape) if specs[0].shard == "experts" else specs[0].shape
        weights[name] = _initial(name, tuple(shape), config, generator)
    return weights


def _initial(name: str, shape: tuple[int, ...], config: V4Config, generator: torch.Generator) -> torch.Tensor:
    h = config.hc_mult
    if name.endswith("tid2eid"):
        token = torch.arange(shape[0])[:, None]
        return (token * 7 + token // 16 + torch.arange(shape[1]) * (config.n_routed_experts // shape[1])) % (
            config.n_routed_experts
        )
    if name.endswith(("norm.weight", "_scale")):
        return torch.ones(shape)
    if name.endswith(("attn_sink", "gate.bias")):
        return torch.zeros(shape)
    noise = torch.randn(shape, generator=generator)
    if name.endswith("_fn"):
        return 0.01 * noise
    if name.endswith("_base"):
        base = 0.1 * noise
        base[:h] += math.log(1 / (h - 1))
        if len(base) > h:
            base[2 * h :] += 3 * torch.eye(h).flatten()
        return base
    if name.endswith("ape"):
        return 0.02 * noise
    if name == "embed.weight":
        return noise
    if name == "head.weight":
        return 0.02 * noise
    quiet = 0.25 if name.endswith(("wo_b.weight", "w2.weight")) else 1.0
    return quiet * noise / shape[-1] ** 0.5


def _adam_rate(name: str) -> float:
    """Learning rate of a parameter that Adam steps, relative to the step's."""
    if name == "embed.weight":
        return 3.0
    return 1.0


class Trainer:
    """Weights, optimisers, data and schedule of one run; `save` and `restore` make it resumable bit for bit."""

    def __init__(self, config: V4Config, settings: TrainSettings, stream: torch.Tensor) -> None:
        self.config, self.settings, self.stream = config, settings, stream
        self.groups = Groups.single()
        self.weights = initial_weights(config, settings.seed)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.step_number = 0
        self.seconds = 0.0
        self.curve: list[tuple[int, float]] = []
        self.table = held_table(config)
        trained = {n: w.requires_grad_() for n, w in self.weights.items() if self._is_trained(n)}
        matrices = {n: w for n, w in trained.items() if self._is_matrix(n)}
        others = {n: w for n, w in trained.items() if n not in matrices}
        self.muon = Muon(matrices)
        self.adam = Adam(others, {n: _adam_rate(n) for n in others})
        self.trained = trained

    @staticmethod
    def _is_trained(name: str) -> bool:
        # Selection is discrete: the language loss gives the indexer and the balancing bias no gradient.
        return not (name.endswith(("tid2eid", "gate.bias")) or ".indexer." in name)

    @staticmethod
    def _is_matrix(name: str) -> bool:
        names = ("wq_a", "wq_b", "wkv", "wgate", "wo_a", "wo_b", "w1", "w2", "w3")
        return name.endswith(".weight") and name.split(".")[-2] in names

    @property
    def progress(self) -> float:
        return min(1.0, self.seconds / (60 * self.settings.minutes))

    def rate(self) -> float:
        """Learning-rate factor: warm-up, a plateau, then a line to zero."""
        warm = min(1.0, (self.step_number + 1) / self.settings.warm_up_steps)
        left = (1 - self.progress) / self.settings.decay_share
        return warm * min(1.0, left)

    @property
    def quantised(self) -> bool:
        return self.progress >= 1 - self.settings.quantised_share

    def as_stored(self) -> Weights:
        """The weights as the checkpoint will hold them, gradients passing straight through."""
        return {
            name: fake_quantise(weight, self.table[name][0].quant)
            if self.table[name][0].quant is not None or self.table[name][0].dtype == "BF16"
            else weight
            for name, weight in self.weights.items()
        }

    def batch(self) -> torch.Tensor:
        """Random windows of the stream, [sequences, length + 1]."""
        s = self.settings
        long = self.step_number % s.long_every == s.long_every - 1
        count, length = (1, s.sequences * s.length) if long else (s.sequences, s.length)
        starts = torch.randint(len(self.stream) - length - 1, (count,), generator=self.generator)
        return torch.stack([self.stream[i : i + length + 1] for i in starts.tolist()])

    def loss(self, weights: Weights, batch: torch.Tensor) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """(mean next-token loss in nats, rows per expert by layer)."""
        model = Model(self.config, weights, self.groups, FLOAT32)
        output = model.forward(model.plan_sequences(batch[:, :-1].tolist()))
        assert output.logits is not None
        return F.cross_entropy(output.logits, batch[:, 1:].flatten()), output.counts

    def step(self) -> float:
        """One update; returns the loss before it."""
        begin = time.perf_counter()
        for weight in self.trained.values():
            weight.grad = None
        loss, counts = self.loss(self.as_stored() if self.quantised else self.weights, self.batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.adam.parameters.values()), self.settings.clip_norm)
        rate = self.rate()
        self.muon.step(rate * self.settings.muon_lr)
        self.adam.step(rate * self.settings.adam_lr)
        self._balance(counts, rate)
        self.step_number += 1
        self.seconds += time.perf_counter() - begin
        self.curve.append((self.step_number, float(loss.detach())))
        return self.curve[-1][1]

    @torch.no_grad()
    def _balance(self, counts: Mapping[int, torch.Tensor], rate: float) -> None:
        for layer, rows in counts.items():
            if not self.config.is_hash_layer(layer):
                load = rows.float()
                bias = self.weights[f"layers.{layer}.ffn.gate.bias"]
                bias += self.settings.balance_rate * rate * torch.sign(load.mean() - load)

    @torch.no_grad()
    def validate(self, held_out: torch.Tensor, *, stored: bool, windows: int = 8, length: int = 1024) -> float:
        """Mean loss on evenly spaced windows of the held-out stream."""
        starts = torch.linspace(0, len(held_out) - length - 2, windows).long().tolist()
        weights = self.as_stored() if stored else self.weights
        losses = [self.loss(weights, held_out[i : i + length + 1][None])[0] for i in starts]
        return float(torch.stack(losses).mean())

    def save(self, directory: Path) -> None:
        """Write everything that a resumed run needs; replaces what an earlier save left, never half."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {f"weight/{n}": w.detach() for n, w in self.weights.items()}
        for kind, buffers in (("muon", self.muon.momentum), ("first", self.adam.first), ("second", self.adam.second)):
            tensors |= {f"{kind}/{n}": b for n, b in buffers.items()}
        tensors["generator"] = self.generator.get_state()
        state = {"step": self.step_number, "seconds": self.seconds, "adam_steps": self.adam.steps, "curve": self.curve}
        save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "state.tmp", {"run": json.dumps(state)})
        (directory / "state.tmp").replace(directory / "state.safetensors")

    def restore(self, directory: Path) -> None:
        """Continue where `save` stopped. ValueError where the file does not fit this run's shape."""
        from safetensors import safe_open

        path = directory / "state.safetensors"
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            state: dict[str, Any] = json.loads(file.metadata()["run"])
        places: dict[str, Weights] = {
            "weight": self.weights,
            "muon": self.muon.momentum,
            "first": self.adam.first,
            "second": self.adam.second,
        }
        for full_name, tensor in tensors.items():
            if full_name == "generator":
                self.generator.set_state(tensor)
                continue
            kind, name = full_name.split("/", 1)
            target = places[kind].get(name)
            if target is None or target.shape != tensor.shape:
                raise ValueError(f"{path}: {full_name} {tuple(tensor.shape)} does not belong to this run")
            target.detach().copy_(tensor)
        self.step_number, self.seconds, self.adam.steps = state["step"], state["seconds"], state["adam_steps"]
        self.curve = [(int(step), float(loss)) for step, loss in state["curve"]]
