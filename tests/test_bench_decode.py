"""The decode and prefill benchmarks: ours and the peer do the same work, and what is told of it is complete."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshspark.benchmarks import contest, decode, limits, prefill, rounds, sample_decode
from meshspark.benchmarks.limits import Meter, Rates, Work, least_work, limit
from meshspark.benchmarks.peer import PeerSteps, peer_model
from meshspark.benchmarks.rounds import Load, Rounds, Side
from meshspark.benchmarks.slice import convert, draw_resident, flash_slice, slice_weights, tiny_slice
from meshspark.launch import cli
from meshspark.models.numerics import BFLOAT16, FLOAT32, W8A8
from meshspark.models.v4.model import Model
from meshspark.models.v4.sizing import held_weights
from meshspark.models.v4.traffic import even_load
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

KEYS = {
    "case", "numerics", "batch", "rows", "context", "ours_s", "ours_min_s", "peer_s", "peer_min_s", "peer_ratio",
    "limit_ratio",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_decode_tells_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, picture = tmp_path / "told.json", tmp_path / "steps.png"
    given = "--case tiny --numerics float32,bfloat16,w8a8 --batch 1,3 --verify 5 --context 30,260 --rounds 1 --steps 1"
    assert (
        cli.main(
            [
                "bench",
                "decode",
                *given.split(),
                "--threads",
                "1",
                "--stages",
                "--json",
                str(told),
                "--plot",
                str(picture),
            ]
        )
        == 0
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    data = json.loads(told.read_text())
    assert (data["schema"], data["benchmark"], data["threads"], data["steps"]) == (1, "decode", 1, 1)
    rows = data["rows"]
    assert all(row.keys() >= KEYS for row in rows)
    loads = [(1, 1), (3, 3), (3, 15)]
    wanted = [(b, r, c, n) for b, r in loads for c in (30, 260) for n in ("float32", "bfloat16", "w8a8")]
    assert [(row["batch"], row["rows"], row["context"], row["numerics"]) for row in rows] == wanted
    for row in rows:
        assert 0 < row["ours_min_s"] <= row["ours_s"] and 0 < row["peer_min_s"] <= row["peer_s"]
        assert row["peer_ratio_min"] <= row["peer_ratio"] <= row["peer_ratio_max"]
        assert row["limit_ratio"] > 0 and row["bound"] in ("memory", "arithmetic")
        # The peer is in FP32 against float32 alone. Narrow numerics choose other experts and entries now and then.
        assert row["peer_numerics"] == ("float32" if row["numerics"] == "float32" else "bfloat16")
        assert row["error"] < (1e-5 if row["numerics"] == "float32" else 0.3)
        assert {"attend", "moe", "hyper"} <= row["stages_ms"].keys()
    assert [(g["rows"], g["numerics"], g["contexts"]) for g in data["growth"]] == [
        (r, n, [30, 260]) for _, r in loads for n in ("float32", "bfloat16", "w8a8")
    ]
    assert set(data["rates"]) == {"read", "float32", "bfloat16", "int8"}
    out = capsys.readouterr().out
    assert "stage, ms a step" in out and "w8a8: a step at 260 takes" in out


def test_prefill_tells_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--case tiny --numerics float32,w8a8 --tokens 50,33 --rounds 1 --threads 1 --json"
    assert cli.main(["bench", "prefill", *given.split()]) == 0
    out = capsys.readouterr()
    data = json.loads(out.out)
    assert [(row["rows"], row["numerics"]) for row in data["rows"]] == [
        (tokens, name) for tokens in (50, 33) for name in ("float32", "w8a8")
    ]
    assert all(row.keys() >= KEYS for row in data["rows"])
    assert [row["error"] < 1e-5 for row in data["rows"] if row["numerics"] == "float32"] == [True, True]
    assert "of limit" in out.err


@pytest.mark.parametrize(
    ("family", "context"),
    [("csa_state", 22), ("index_state", 98), ("csa_index", 98), ("csa_kv", 98), ("hca_kv", 130), ("window_kv", 98)],
)
def test_another_cache_is_other_work(family: str, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees a family with other signs in the peer's cache."""
    filled = decode.PeerSteps

    def wrong(net: torch.nn.Module, resident: decode.Resident) -> PeerSteps:
        rows = dict(resident.rows)
        rows[family] = -rows[family]
        return filled(net, decode.Resident(resident.length, rows))

    monkeypatch.setattr(decode, "PeerSteps", wrong)
    given = f"--case tiny --batch 8 --verify 0 --context {context} --rounds 1 --steps 2 --threads 1"
    assert cli.main(["bench", "decode", *given.split()]) == 1


def test_turns_can_be_repeated() -> None:
    """A run leaves the caches of both sides so that the next one gives the same."""
    config = tiny_slice()
    weights = slice_weights(config, 3)
    model = Model(config, convert(weights, config, FLOAT32), Groups.single(), FLOAT32)
    tokens_KBS = torch.randint(2, config.vocab_size, (3, 2, 4), generator=torch.Generator().manual_seed(0))
    resident = draw_resident(config, 2, 125, 9)
    ours = decode.OurSteps(model, resident, tokens_KBS)
    theirs = decode.TheirSteps(peer_model(config, weights), resident, tokens_KBS)
    first = ours.run()
    assert torch.equal(first, ours.run())
    assert torch.equal(theirs.run(), theirs.run())
    torch.testing.assert_close(first, theirs.run(), rtol=1e-4, atol=1e-4)
    # Another model of the same numbers, in the other direction: the hits are those of the rows.
    assert all(1 <= ours.hit[layer] <= config.n_routed_experts for layer in range(4))


def test_weights_are_shared_with_the_peer_and_hold_bf16_numbers() -> None:
    config = tiny_slice()
    weights = slice_weights(config, 0)
    state = peer_model(config, weights, torch.bfloat16).state_dict()
    up = weights["layers.1.ffn.experts.w3.weight"]
    joined = state["model.layers.1.mlp.experts.gate_up_proj"]
    assert joined[:, config.moe_intermediate_size :].data_ptr() == up.data_ptr() and torch.equal(joined[:, 32:], up)
    assert state["model.layers.0.self_attn.kv_norm.weight"].dtype == torch.float32
    assert state["lm_head.weight"].dtype == torch.bfloat16
    for name, tensor in weights.items():
        if tensor.dtype == torch.float32 and "hc_" not in name:
            assert torch.equal(tensor, tensor.to(torch.bfloat16).float()), name
    assert not torch.equal(up[0], up[1])
    assert torch.equal(slice_weights(config, 0)["layers.3.attn.wq_b.weight"], weights["layers.3.attn.wq_b.weight"])


def test_the_slice_is_flash_but_for_what_is_said() -> None:
    config = flash_slice()
    assert (config.hidden_size, config.num_attention_heads, config.index_topk, config.moe_intermediate_size) == (
        4096, 64, 512, 2048,
    )  # fmt: skip
    assert config.compress_ratios == (0, 4, 128, 4) and config.is_hash_layer(0) and not config.is_hash_layer(1)
    assert 14 << 30 > contest.needed_bytes(config, ("w8a8", "bfloat16")) > 10 << 30


def test_limit_by_hand() -> None:
    """Every expert hit costs its bytes; rows cost operations; the larger sum of the two counts."""
    config, load = flash_slice(), even_load(1, requests=8, rows_each=1, prefill_rows=0)
    few, many = (dict.fromkeys(range(4), hit) for hit in (6, 16))
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    for numerics, size in ((BFLOAT16, 2 * expert), (W8A8, expert + 4 * (2 * 2048 + 4096))):
        less, more = (least_work(config, numerics, load, 1024, hit) for hit in (few, many))
        assert more.bytes - less.bytes == 4 * 10 * size
        assert (more.flops, more.int8_ops) == (less.flops, less.int8_ops)
        held = sum(each.num_bytes for each in held_weights(config, Topology(), numerics).values())
        assert 0.98 * held < more.bytes < 1.02 * held
    assert least_work(config, W8A8, load, 1024, few).int8_ops > 8 * 4 * 6 * 2 * expert
    rates = Rates(2.0, {"float32": 10.0, "bfloat16": 4.0, "int8": 8.0})
    assert limit(Work(6, 8, 8), rates, W8A8) == limits.Limit(3.0, "memory")
    assert limit(Work(5, 8, 8), rates, W8A8) == limits.Limit(3.0, "arithmetic")
    assert limit(Work(1, 8, 0), rates, FLOAT32) == limits.Limit(0.8, "arithmetic")


def test_ratios_are_taken_within_rounds() -> None:
    """A machine that slows down in a round slows both: the median of the ratios, not the ratio of medians."""
    ours, peer = Side("float32", 8), Side("float32", 8, peer=True)
    longer = Side("float32", 64)
    rates = [Rates(1.0, {"float32": 1.0, "bfloat16": 1.0})] * 3
    seconds = {ours: [1.0, 10.0, 2.0], peer: [2.0, 30.0, 2.0], longer: [1.5, 12.0, 4.0]}
    found = Rounds(seconds, rates, {})
    row = rounds.make_row(Load("slice", 2, 2), ours, peer, found, FLOAT32, Work(1.0, 0.5, 0.0))
    assert (row.peer_ratio, row.peer_ratio_min, row.peer_ratio_max) == (2.0, 1.0, 3.0)
    assert (row.ours_s, row.ours_min_s, row.peer_s, row.peer_min_s) == (2.0, 1.0, 2.0, 2.0)
    assert (row.limit_s, row.limit_ratio, row.bound) == (1.0, 0.5, "memory")
    assert rounds.growth(found) == {"float32": 1.5}


def test_turns_alternate() -> None:
    order: list[str] = []
    sides = {Side(name, 1): ((lambda name=name: order.append(name)), 2) for name in "ab"}
    found = rounds.take_turns(sides, Meter(False, 1 << 12, 8), 2)
    assert order == ["a", "b"] * 3
    assert [len(each) for each in found.seconds.values()] == [2, 2] and len(found.rates) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--batch 0", "--batch is 0, allowed: 1 to 1,024"),
        ("--batch x", "--batch is 'x', allowed"),
        ("--context 0", "--context is 0, allowed: 1 to"),
        ("--context 1048576", "--context is 1048576, allowed: 1 to"),
        ("--rounds 0", "--rounds is 0, allowed: 1"),
        ("--steps 0", "--steps is 0, allowed: 1"),
        ("--verify -1", "--verify is -1, allowed: 0"),
        ("--new-tokens 0", "--new-tokens is 0, allowed: 1"),
        ("--prompt-tokens 0", "--prompt-tokens is 0, allowed: 1"),
        ("--threads 0", "--threads is 0, allowed: 1"),
        ("--layers 0,5", "--layers is '0,5', allowed: 0, 4 and 128"),
        ("--case no", "--case has 'no', allowed: slice, sample, tiny"),
        ("--numerics float32,int4", "--numerics has 'int4', allowed"),
        ("--numerics float64", "--numerics has 'float64', allowed"),
        ("--new-tokens 1000000", "positions, allowed:"),
        ("--checkpoint no/such/folder", "--checkpoint is 'no/such/folder', but no/such/folder/config.json does not"),
        ("--ranks 2", "unrecognized arguments: --ranks 2"),
        ("--json no/such/folder/x", "--json is 'no/such/folder/x'"),
    ],
)
def test_decode_refuses(given: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(contest, "slice_weights", lambda *_: pytest.fail("weights were drawn"))
    monkeypatch.setattr(sample_decode, "load_weights", lambda *_: pytest.fail("the model was loaded"))
    assert cli.main(["bench", "decode", *given.split()]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--tokens 0", "--tokens is 0, allowed: 1 to 16,384"),
        ("--case sample", "--case has 'sample', allowed: slice, tiny"),
        ("--layers 4,,4", "--layers is '4,,4', allowed"),
        ("--threads 2000", "--threads is 2000, allowed"),
    ],
)
def test_prefill_refuses(given: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(contest, "slice_weights", lambda *_: pytest.fail("weights were drawn"))
    assert cli.main(["bench", "prefill", *given.split()]) == 2
    assert message in capsys.readouterr().err


def test_too_little_memory_is_told_before_the_work(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(contest, "free_bytes", lambda: 1 << 30)
    monkeypatch.setattr(contest, "slice_weights", lambda *_: pytest.fail("weights were drawn"))
    monkeypatch.setattr(prefill, "make_meter", lambda *_: None)
    assert cli.main(["bench", "prefill", "--threads", "1"]) == 2
    assert "free are 1,073,741,824; give one --numerics or fewer --layers" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["contest", "sample_decode"])
def test_it_says_what_it_misses(module: str, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(*_: object) -> None:
        raise ImportError("No module named 'transformers'")

    case = {"contest": "tiny", "sample_decode": "sample"}[module]
    monkeypatch.setattr(f"meshspark.benchmarks.{module}.peer_model", missing)
    monkeypatch.setattr(sample_decode, "Model", lambda *_: SimpleNamespace())
    assert cli.main(["bench", "decode", "--threads", "1", "--case", case]) == 2
    assert "pip install 'meshspark[test]'" in capsys.readouterr().err


def test_the_sample_writes_as_the_peer_does(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(decode, "make_meter", lambda *_: Meter(False, 1 << 12, 8))
    given = "--case sample --numerics float32 --batch 2 --prompt-tokens 8 --new-tokens 3 --rounds 1 --threads 1 --json"
    assert cli.main(["bench", "decode", *given.split()]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["case"], row["batch"], row["rows"], row["context"], row["same_ids"]) == ("sample", 2, 2, 8, True)
