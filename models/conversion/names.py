"""Our names for a drafter's tensors: which official ones each is made of. training.md 8.2."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from ..checkpoint.names import TensorSpec
from .variants import IMAGE_BIAS, VARIANTS, Variant

CONFIDENCE, MARKOV = "confidence_head.proj.weight", "markov_head."

FIXED = {
    "main_proj.weight": "fc.weight",
    "main_norm.weight": "hidden_norm.weight",
    **{name: name for name in ("e_proj.weight", "enorm.weight", "h_proj.weight", "hnorm.weight")},
    "norm.weight": "norm.weight",
    "hc_head_fn": "residual_readout.mix_weight",
    "hc_head_base": "residual_readout.mix_bias",
    "hc_head_scale": "residual_readout.mix_scale",
    CONFIDENCE: CONFIDENCE,
    **{
        each.markov[index].removeprefix("."): f"markov_head.markov_w{index + 1}.weight"
        for each in VARIANTS.values()
        for index in range(2)
    },
}
"""What follows mtp.{s}. in an official name -> our name, for tensors that a drafter has once."""

STAGE = {
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.expert_bias",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "hc_attn_fn": "attn_residual.mix_weight",
    "hc_attn_base": "attn_residual.mix_bias",
    "hc_attn_scale": "attn_residual.mix_scale",
    "hc_ffn_fn": "ffn_residual.mix_weight",
    "hc_ffn_base": "ffn_residual.mix_bias",
    "hc_ffn_scale": "ffn_residual.mix_scale",
}
"""What follows mtp.{s}. -> what follows layers.{s}. in our name."""

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
EXPERTS = {"w1": (GATE_UP, 0), "w3": (GATE_UP, 1), "w2": (DOWN, 0)}
"""A matrix of an expert -> (the stack that it goes into, its place there: the gate's rows come first)."""


@dataclass(frozen=True)
class DraftTensor:
    """One tensor of ours: its logical shape, and the official ones that it is made of.

    experts: for a stack those of each expert in order, their rows one below the other; else one entry of one spec.
    is_wide: held in FP32 whatever the draft's dtype is.
    """

    name: str
    shape: tuple[int, ...]
    is_wide: bool
    experts: tuple[tuple[TensorSpec, ...], ...]

    @property
    def is_stack(self) -> bool:
        return self.experts[0][0].shard == "experts"

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Place:
    """Where an official tensor lies among ours: the tensor, the index of its expert, and its rows of that."""

    tensor: DraftTensor
    expert: int | None
    rows: slice


def draft_tensors(table: Iterable[TensorSpec]) -> tuple[DraftTensor, ...]:
    """Our tensors of an official table, stage after stage. The image bias is in none of them."""
    made: dict[str, dict[tuple[int, int], TensorSpec]] = {}
    for spec in table:
        if not spec.name.endswith(IMAGE_BIAS):
            name, expert, place = our_name(spec)
            made.setdefault(name, {})[expert or 0, place] = spec
    return tuple(_tensor(name, parts) for name, parts in made.items())


def without_markov(tensors: Iterable[DraftTensor], hidden_size: int) -> tuple[DraftTensor, ...]:
    """The tensors of a draft of the same sizes that has no Markov head: its confidence reads the readout alone."""
    narrow = (1, hidden_size)
    kept = (tensor for tensor in tensors if not tensor.name.startswith(MARKOV))
    return tuple(replace(tensor, shape=narrow) if tensor.name == CONFIDENCE else tensor for tensor in kept)


def is_markov(spec: TensorSpec, variant: Variant) -> bool:
    """Whether an official tensor is one of the two Markov tables."""
    return spec.name.endswith(variant.markov)


def our_name(spec: TensorSpec) -> tuple[str, int | None, int]:
    """(our name, index of the expert, place among that expert's matrices in the stack) of an official tensor."""
    _, stage, rest = spec.name.split(".", 2)
    if spec.expert is not None:
        stack, place = EXPERTS[rest.split(".")[3]]
        return f"layers.{stage}.{stack}", spec.expert, place
    return FIXED.get(rest) or f"layers.{stage}.{STAGE[rest]}", None, 0


def places(tensors: Iterable[DraftTensor]) -> dict[str, Place]:
    """Official name -> where it lies among ours."""
    found: dict[str, Place] = {}
    for tensor in tensors:
        for expert, parts in enumerate(tensor.experts):
            start = 0
            for spec in parts:
                rows = slice(start, start + spec.shape[0])
                found[spec.name] = Place(tensor, expert if tensor.is_stack else None, rows)
                start = rows.stop
    return found


def _tensor(name: str, parts: dict[tuple[int, int], TensorSpec]) -> DraftTensor:
    count = max(expert for expert, _ in parts) + 1
    width = max(place for _, place in parts) + 1
    experts = tuple(tuple(parts[expert, place] for place in range(width)) for expert in range(count))
    first = experts[0][0]
    shape = first.shape
    if first.shard == "experts":
        shape = (count, sum(spec.shape[0] for spec in experts[0]), first.shape[1])
    return DraftTensor(name, shape, first.dtype == "F32", experts)
