"""The context gather of every payload kind: raw bits, ragged views, zero rows, against the oracle."""

import pytest
import torch

from meshspark.comm import oracle
from meshspark.comm.context_gather import gather_context
from meshspark.layouts.bits import same_bits
from meshspark.layouts.payloads import KINDS, payload
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

MODES = {
    "bfloat16": (torch.bfloat16, torch.float32, torch.bfloat16),
    "float32": (torch.float32, torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64, torch.float64),
}


def _payload(kind, mode, head_dim=16, index_head_dim=4):
    kv, state, wire = MODES[mode]
    sizes = {"head_dim": head_dim, "index_head_dim": index_head_dim}
    return payload(kind, **sizes, kv_dtype=kv, state_dtype=state, wire=wire)


def _bits(span, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, span.columns * span.dtype.itemsize)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return raw.view(span.dtype) if rows else torch.empty((0, span.columns), dtype=span.dtype)


def sweep(groups, kind, mode):
    group = groups.cp
    for epoch, (local_t, head_dim) in enumerate([(17, 16), (1, 16), (0, 16), (8, 512), (17, 2)]):
        p = _payload(kind, mode, head_dim)
        inputs = [
            {s.name: _bits(s, local_t, 1000 * epoch + 10 * rank + i) for i, s in enumerate(p.spans)}
            for rank in range(group.size)
        ]
        mine = {name: t.t().contiguous().t() if epoch % 2 else t for name, t in inputs[group.rank].items()}
        got = gather_context(mine, p, group, stage=kind)
        wanted = oracle.gather_context(inputs)[group.rank]
        assert list(got) == [s.name for s in p.spans]
        assert all(same_bits(got[name], wanted[name]) for name in wanted), (kind, mode, epoch)


def every_pattern(groups):
    group = groups.cp
    p = _payload("hca", "bfloat16", 256)
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 256)
    words = patterns.view(128, 512).view(torch.float32)
    inputs = [
        {"value": words.roll(r, 0), "score": words.flip(0), "kv": patterns[r : r + 128]} for r in range(group.size)
    ]
    got = gather_context(inputs[group.rank], p, group, stage="hca")
    wanted = oracle.gather_context(inputs)[0]
    assert all(same_bits(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(ranks, world, mode, kind):
    ranks.run_both(Topology(world, world, world), "test_context_gather:sweep", kind=kind, mode=mode)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_pattern(ranks, world):
    ranks.run_both(Topology(world, world, world), "test_context_gather:every_pattern")


def test_two_groups_of_two(ranks):
    ranks.run(Topology(4, 2, 4), "test_context_gather:sweep", kind="hca", mode="bfloat16")


def test_a_group_of_one_never_packs():
    p = _payload("hca", "bfloat16")
    tensors = {s.name: torch.zeros(3, s.columns, dtype=s.dtype) for s in p.spans}
    tensors["value"].requires_grad_()
    got = gather_context(tensors, p, Groups.single().cp, stage="hca")
    assert all(got[name] is tensors[name] for name in tensors)
