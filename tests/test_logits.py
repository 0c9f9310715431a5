"""Asked rows, their logits and their best ids over vocabulary shards, against the oracle."""

import pytest
import torch

from meshspark.comm import logits as lg
from meshspark.comm import oracle
from meshspark.layouts.bits import same_bits
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

NAN = float("nan")


def _counts(size):
    return [[1] * size, [3, 0, 5, 17][:size], [0] * size, [0] * (size - 1) + [2], [5] * size]


def _destinations(counts, seed):
    generator = torch.Generator().manual_seed(seed)
    size, rows = len(counts), sum(counts)
    own = [rank for rank, count in enumerate(counts) for _ in range(count)]
    return [own, [size - 1] * rows, torch.randint(0, size, (rows,), generator=generator).tolist()]


def gather(groups):
    group = groups.tp
    for case, counts in enumerate(_counts(group.size)):
        hidden = [torch.randn(n, 6, generator=torch.Generator().manual_seed(case)).bfloat16() for n in counts]
        got = lg.gather_asked(hidden[group.rank], counts, group, stage="asked")
        assert same_bits(got, oracle.gather_asked(hidden)[group.rank])


def give_back(groups, dtype):
    group = groups.tp
    dtype = getattr(torch, dtype)
    for case, counts in enumerate(_counts(group.size)):
        for destination in _destinations(counts, case):
            generator = torch.Generator().manual_seed(case)
            # Few different values, so that ties inside and across shards are the rule.
            shape = (sum(counts), 5)
            shards = [(torch.randint(-4, 0, shape, generator=generator) / 2).to(dtype) for _ in range(group.size)]
            if sum(counts) > 2:
                shards[-1][1, 2] = NAN
                for shard in shards:
                    shard[2] = -torch.inf
            got = lg.return_logits(shards[group.rank], destination, group, stage="logits")
            assert same_bits(got, oracle.return_logits(shards, destination)[group.rank])
            ids, values = lg.return_best(shards[group.rank], 5 * group.rank, destination, group, stage="best")
            wanted_ids, wanted = oracle.return_best(shards, destination)[group.rank]
            assert ids.tolist() == wanted_ids.tolist() and ids.dtype == torch.int64
            assert torch.equal(values.nan_to_num(99.0), wanted.nan_to_num(99.0)) and values.dtype == dtype


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_asked_rows(ranks, tp):
    ranks.run_both(Topology(tp, tp, tp), "test_logits:gather")


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits_and_best(ranks, tp, dtype):
    ranks.run_both(Topology(tp, tp, tp), "test_logits:give_back", dtype=dtype)


def test_two_tensor_groups(ranks):
    ranks.run(Topology(4, 2, 4), "test_logits:give_back", dtype="float32")


def test_best_of_one_shard_by_hand():
    rows = torch.tensor([[-3.0, -1.0, -1.0], [NAN, 2.0, 1.0], [-torch.inf] * 3])
    ids, _ = lg.return_best(rows, 0, [0, 0, 0], Groups.single().tp, stage="best")
    assert ids.tolist() == [1, -1, -1]


def test_refusals():
    group = Groups.single().tp
    with pytest.raises(ValueError, match="is the 2 rows given"):
        lg.gather_asked(torch.zeros(2, 3), [1], group, stage="s")
    with pytest.raises(ValueError, match="names 1 rows, but there are 2"):
        lg.return_logits(torch.zeros(2, 3), [0], group, stage="s")
    with pytest.raises(ValueError, match=r"has \[1\], allowed: 0 to 0"):
        lg.return_best(torch.zeros(2, 3), 0, [0, 1], group, stage="s")
