"""The oracles against small grids worked out by hand."""

import torch

from meshspark.comm import oracle
from meshspark.comm.oracle import Route


def _rows(*values):
    return torch.tensor(values).unsqueeze(1)


def test_all_gather_rows():
    assert [x.flatten().tolist() for x in oracle.all_gather_rows([_rows(1, 2), _rows(3, 4)])] == [[1, 2, 3, 4]] * 2
    assert [x.flatten().tolist() for x in oracle.gather_asked([_rows(1), _rows(2, 3)])] == [[1, 2, 3]] * 2


def test_exchange_rows():
    counts = [[1, 2], [0, 1]]
    got = oracle.exchange_rows([_rows(1, 2, 3), _rows(4)], counts)
    assert [x.flatten().tolist() for x in got] == [[1], [2, 3, 4]]


def test_exchange_counts_is_a_transpose():
    got = oracle.exchange_counts([torch.tensor([1, 2]), torch.tensor([3, 4])])
    assert [x.tolist() for x in got] == [[1, 3], [2, 4]]


def test_broadcast_bytes():
    assert oracle.broadcast_bytes([None, b"a"], 1) == [b"a", b"a"]


def test_gather_context():
    got = oracle.gather_context([{"a": _rows(1), "b": _rows(2)}, {"a": _rows(3), "b": _rows(4)}])
    assert [x["b"].flatten().tolist() for x in got] == [[2, 4]] * 2


def test_publish_heads():
    # rank, row, group: 100 * rank + 10 * row + group
    heads = [torch.tensor([[[0], [1]], [[10], [11]]]), torch.tensor([[[100], [101]], [[110], [111]]])]
    got = [x.flatten().tolist() for x in oracle.publish_heads(heads)]
    assert got == [[0, 10, 100, 110], [1, 11, 101, 111]]


def test_reduce_partials_adds_halves_first():
    # (1e8 + 1) + (-1e8 + 1) is 0 in float32 by halves, 1 from left to right with -1e8 second.
    by_group = torch.tensor([1e8, 1.0, -1e8, 1.0])
    partials = [by_group[:2].reshape(1, 2, 1).repeat(2, 1, 1), by_group[2:].reshape(1, 2, 1).repeat(2, 1, 1)]
    assert [x.tolist() for x in oracle.reduce_partials(partials)] == [[[0.0]], [[0.0]]]


def test_gather_weight_shards():
    (a, b), _ = oracle.gather_weight_shards([(_rows(1), _rows(1, 2)), (_rows(2), _rows(3, 4))])
    assert a.flatten().tolist() == [1, 2] and b.tolist() == [[1, 3], [2, 4]]


def test_return_logits_and_best():
    logits = [torch.tensor([[1.0, 5.0], [-3.0, -9.0]]), torch.tensor([[5.0, 2.0], [-2.0, -2.0]])]
    got = oracle.return_logits(logits, [1, 0])
    assert [x.tolist() for x in got] == [[[-3.0, -9.0, -2.0, -2.0]], [[1.0, 5.0, 5.0, 2.0]]]
    assert [ids.tolist() for ids, _ in oracle.return_best(logits, [1, 0])] == [[2], [1]]
    logits[0][0, 0] = float("nan")
    assert [ids.tolist() for ids, _ in oracle.return_best(logits, [1, 0])] == [[2], [-1]]


def test_dispatch_and_combine():
    indices = [torch.tensor([[3, 0], [0, -1]]), torch.tensor([[0, 2]])]
    routes = oracle.dispatch(indices, [None, None], 4)
    assert routes[0] == [Route(0, 0, 0, 1), Route(0, 0, 1, 0), Route(0, 1, 0, 0)]
    assert routes[1] == [Route(2, 1, 0, 1), Route(3, 0, 0, 0)]
    none = oracle.dispatch(indices, [torch.tensor([False, True]), None], 4)
    assert none[0] == [Route(0, 0, 1, 0), Route(0, 1, 0, 0)]
    back = oracle.combine([_rows(1, 2, 3), _rows(4, 5)], routes, [2, 1], 2)
    assert back[0].squeeze(2).tolist() == [[5, 1], [2, 0]]
    assert back[1].squeeze(2).tolist() == [[3, 4]]
