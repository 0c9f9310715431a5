"""Features: equal to transformers' states, alike on two ranks, kept in files to the byte; misfits are named."""

import json
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import torch
from episodes import full_weights, make_model
from rank_pool import from_bytes, to_bytes

from meshspark.launch import cli, features
from meshspark.launch.flags import resolve
from meshspark.models.checkpoint.synthetic import synthesize
from meshspark.models.training.capture import Features, TargetCapture
from meshspark.models.training.feature_files import INDEX_NAME, FeatureFiles, ShardWriter, plan_features, write_index
from meshspark.models.training.feature_spec import FeatureSpec
from meshspark.models.training.token_files import TokenSample
from meshspark.models.v4.config import tiny
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

SPEC = FeatureSpec((2, 0, 4), "mean_out", 64, 264)
SEQUENCES = [list(range(3, 73)), [5, 7, 9] * 9, [250 - i for i in range(41)]]


@pytest.mark.parametrize("point", ["mean_out", "mean_in"])
def test_features_are_transformers_states(point):
    from golden_transformers import golden_model

    net = golden_model(tiny(), full_weights("tiny", "float32"))
    seen = {}
    for layer, block in enumerate(net.model.layers):
        block.register_forward_hook(lambda _, given, out, layer=layer: seen.update({layer: (given[0], out)}))
    spec = replace(SPEC, point=point)
    found = TargetCapture(make_model(Groups.single(), "tiny", "float32"), spec).run(SEQUENCES)
    assert sorted(found) == [0, 1, 2]
    for number, tokens in enumerate(SEQUENCES):
        with torch.no_grad():
            last = net.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        states = [seen[layer][point == "mean_out"] for layer in spec.layers]
        states = [(s[0] if isinstance(s, tuple) else s)[0].mean(1) for s in states]
        assert found[number].hidden_states.dtype == torch.bfloat16
        torch.testing.assert_close(
            found[number].hidden_states.float(), torch.cat(states, -1).detach(), rtol=2**-7, atol=1e-3
        )
        torch.testing.assert_close(found[number].last_hidden_states.float(), last, rtol=2**-7, atol=1e-3)


def test_no_teacher_and_no_sequences():
    capture = TargetCapture(make_model(Groups.single(), "tiny", "float32"), replace(SPEC, teacher=False))
    assert capture.run([]) == {}
    assert capture.run([[1, 2, 3]])[0].last_hidden_states is None


def _on_ranks(groups, rank_sequences):
    """Each tp_rank owns one sequence, or none; the other TP group, where there is one, has none at all."""
    capture = TargetCapture(make_model(groups, "tiny", "float64"), SPEC)
    place = groups.topology.coordinates(groups.rank)
    sequences, owners = rank_sequences[place.dp_rank]
    found = capture.run(sequences, owners)
    return {str(i): [to_bytes(f.hidden_states), to_bytes(f.last_hidden_states)] for i, f in found.items()}


def _same(found, alone):
    for packed, part in zip(found, (alone.hidden_states, alone.last_hidden_states), strict=True):
        # FP64 sums part in the last bit, BF16 may round them to neighbours.
        torch.testing.assert_close(from_bytes(packed).float(), part.float(), rtol=2**-7, atol=1e-6)


def test_states_come_to_their_owner_on_two_ranks(ranks):
    alone = TargetCapture(make_model(Groups.single(), "tiny", "float64"), SPEC).run(SEQUENCES)
    owned = ranks.run(
        Topology(2, 2, 2), "test_features:_on_ranks", timeout=120, rank_sequences=[[SEQUENCES, [1, 0, 1]]]
    )
    assert [sorted(each) for each in owned] == [["1"], ["0", "2"]]
    for i, rank in ((0, 1), (1, 0), (2, 1)):
        _same(owned[rank][str(i)], alone[i])
    idle = ranks.run(
        Topology(2, 1, 2), "test_features:_on_ranks", timeout=120, rank_sequences=[[SEQUENCES[:1], [0]], [[], []]]
    )
    assert idle[1] == {}
    _same(idle[0]["0"], alone[0])


def _verb(groups, argv):
    args = features.parser().parse_args(argv)
    flags = resolve(args, groups.topology.world)
    features.run(groups, features.prepare(args, flags), flags)


def test_two_tensor_groups_write_shards_of_their_own(ranks, tmp_path):
    synthesize(tmp_path / "target", tiny(), 1)
    (tmp_path / "data").mkdir()
    lines = [{"prompt_ids": ids[:5], "output_ids": ids[5:]} for ids in [*SEQUENCES, SEQUENCES[0][:20]]]
    (tmp_path / "data" / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["--checkpoint", str(tmp_path / "target"), "--data", str(tmp_path / "data"), "--layers", "2,0,4"]
    argv += ["--numerics", "float64", "--rows", "30"]
    ranks.run(Topology(2, 1, 2), "test_features:_verb", timeout=120, argv=[*argv, "--out", str(tmp_path / "two")])
    assert cli.main(["features", *argv, "--out", str(tmp_path / "one")]) == 0
    one, two = FeatureFiles(tmp_path / "one"), FeatureFiles(tmp_path / "two")
    assert len(list((tmp_path / "two").glob("*.safetensors"))) == 3
    assert one.lengths == two.lengths and (one.target, one.data) == (two.target, two.data)
    for i in range(len(one)):
        for name, tensor in one[i].items():
            torch.testing.assert_close(two[i][name].float(), tensor.float(), rtol=2**-7, atol=1e-6)


def _samples(lengths, seed=0):
    draw = np.random.default_rng(seed)
    return [
        TokenSample(draw.integers(0, 264, n).astype(np.int32), np.array([0] + [1] * (n - 1), dtype=np.uint8))
        for n in lengths
    ]


def _write(folder, lengths=(5, 3, 9, 4), shard_bytes=9 * 600, spec=SPEC):
    """A folder of random features; (plan, samples, features)."""
    samples, states = _samples(lengths), []
    plan = plan_features(spec, lengths, target="t", data="d", shard_bytes=shard_bytes)
    folder.mkdir(exist_ok=True)
    for shard in plan.shards:
        writer = ShardWriter(folder, spec, shard)
        for i in range(shard.first, shard.first + len(shard.lengths)):
            noise = torch.randn(lengths[i], spec.width + 64, generator=torch.Generator().manual_seed(i)).bfloat16()
            last = noise[:, spec.width :] if spec.teacher else None
            states.append(Features(noise[:, : spec.width], last))
            writer.add(samples[i], states[-1])
        writer.close()
    write_index(folder, plan)
    return plan, samples, states


@pytest.mark.parametrize("teacher", [True, False])
def test_files_hold_what_was_written_and_take_what_was_planned(tmp_path, teacher):
    plan, samples, states = _write(tmp_path, spec=replace(SPEC, teacher=teacher))
    assert plan.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert [shard.lengths for shard in plan.shards] == ([(5, 3), (9,), (4,)] if teacher else [(5, 3), (9, 4)])
    files = FeatureFiles(tmp_path)
    assert (files.lengths, files.spec, files.target, files.data) == ([5, 3, 9, 4], plan.spec, "t", "d")
    for i in (3, 0, 2, 1):
        found = files[i]
        assert found["input_ids"][0].tolist() == samples[i].input_ids.tolist()
        assert found["loss_mask"][0].tolist() == samples[i].loss_mask.tolist()
        assert torch.equal(found["hidden_states"][0], states[i].hidden_states)
        assert ("target_last_hidden_states" in found) == teacher
        if teacher:
            assert torch.equal(found["target_last_hidden_states"][0], states[i].last_hidden_states)


def test_a_shard_that_is_not_whole_has_no_name(tmp_path):
    plan = plan_features(SPEC, [4, 4], target="t", data="d")
    writer = ShardWriter(tmp_path, SPEC, plan.shards[0])
    good = Features(torch.zeros(4, 192, dtype=torch.bfloat16), torch.zeros(4, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"hidden_states of sample 0 is torch.bfloat16 \[4, 191\], allowed: .* 192\]"):
        writer.add(_samples([4])[0], replace(good, hidden_states=good.hidden_states[:, 1:]))
    writer.add(_samples([4])[0], good)
    assert not (tmp_path / plan.shards[0].name).exists()
    writer.drop()
    assert not list(tmp_path.iterdir())


def _spoil_index(folder, **change):
    path = folder / INDEX_NAME
    path.write_bytes(msgpack.packb({**msgpack.unpackb(path.read_bytes()), **change}))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"schema": 2}, "no index of features of schema 1"),
        ({"layers": []}, r"features.msgpack: layers is \[\]"),
        ({"layers": [1, 1, 2]}, "each layer once"),
        ({"layers": [0, 1]}, "declared in features.msgpack"),
        ({"hidden_size": 32}, "declared in features.msgpack"),
        ({"teacher": False}, "declared in features.msgpack"),
        ({"dtype": "float32"}, "dtype is 'float32', allowed: bfloat16"),
        ({"point": "sum_out"}, "point is 'sum_out', allowed: mean_out, mean_in, streams"),
        ({"point": "streams"}, "features declare no streams"),
        ({"point": "streams", "streams": 4}, "allowed at point 'streams': one, the target's last"),
        ({"point": "streams", "streams": 4, "layers": [4]}, "declared in features.msgpack"),
        ({"vocab_size": 200}, "sample 0: ids"),
        ({"target": 3}, "target is 3, allowed: a text"),
        ({"samples": 5}, "lengths are not those of 5 samples"),
        ({"tokens": 20}, "sum up to 21, declared: 20"),
        ({"shards": [["../x", 4]]}, "plain file names"),
        ({"shards": [["features-00000.safetensors", 2]]}, "shards hold 2 samples, declared: 4"),
        ({"shards": [["features-00000.safetensors", 5]]}, "a shard is"),
        ({"shards": [["features-00000.safetensors", 1], ["features-00001.safetensors", 3]]}, "declared in"),
    ],
)
def test_an_index_that_does_not_fit_is_named(tmp_path, change, said):
    _write(tmp_path)
    _spoil_index(tmp_path, **change)
    with pytest.raises(ValueError, match=said):
        FeatureFiles(tmp_path)


def test_damaged_shards_and_absent_indices_are_named(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        FeatureFiles(tmp_path)
    plan, *_ = _write(tmp_path)
    path = tmp_path / plan.shards[1].name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=plan.shards[1].name):
        FeatureFiles(tmp_path)
    path.write_bytes(whole[:-1] + b"\2")
    with pytest.raises(ValueError, match="loss_mask holds 2"):
        FeatureFiles(tmp_path)
    path.write_bytes(whole[:-9] + b"\0" * 9)
    with pytest.raises(ValueError, match="no two tokens in a row"):
        FeatureFiles(tmp_path)
    (tmp_path / INDEX_NAME).write_bytes(b"\xc1")
    with pytest.raises(ValueError, match="no msgpack"):
        FeatureFiles(tmp_path)


def test_every_difference_from_the_draft_is_named():
    SPEC.require(replace(SPEC, teacher=False))
    for change, said in (
        ({"layers": (0, 2, 4)}, r"layers is \(2, 0, 4\), the draft needs \(0, 2, 4\)"),
        ({"point": "mean_in"}, "point is mean_out, the draft needs mean_in"),
        ({"hidden_size": 65}, "hidden_size is 64, the draft needs 65"),
        ({"vocab_size": 265}, "vocab_size is 264"),
    ):
        with pytest.raises(ValueError, match=said):
            SPEC.require(replace(SPEC, **change))
    with pytest.raises(ValueError, match="no target_last_hidden_states"):
        replace(SPEC, teacher=False).require(SPEC)
    with pytest.raises(ValueError, match="the target has layers 0 to 3"):
        SPEC.check_target(4, 64, 264, 4)


def test_the_verb(tmp_path, capsys):
    synthesize(tmp_path / "target", tiny(), 1)
    (tmp_path / "data").mkdir()
    lines = [{"prompt_ids": ids[:10], "output_ids": ids[10:]} for ids in SEQUENCES]
    (tmp_path / "data" / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = ["features", "--checkpoint", str(tmp_path / "target"), "--data", str(tmp_path / "data"), "--rows", "80"]
    command = [*base, "--layers", "2,0,4", "--out", str(tmp_path / "out")]
    assert cli.main([*command, "--size-only", "--json"]) == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert told["written"] is False and told["tokens"] == 138 and not (tmp_path / "out").exists()
    assert f"{told['bytes']:,} bytes for 138 tokens of 3 samples: layers 2,0,4 at mean_out" in shown.err
    assert cli.main(command) == 0
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) == told["bytes"]
    files = FeatureFiles(tmp_path / "out")
    assert files.spec == SPEC and files[1]["input_ids"][0].tolist() == SEQUENCES[1]
    assert files[1]["loss_mask"][0].tolist() == [0] * 10 + [1] * 17
    capsys.readouterr()
    for wrong, said in (
        ([], "which holds something"),
        (["--layers", "2,9"], "the target has layers 0 to 4"),
        (["--layers", "2;3"], "--layers is '2;3'"),
        (["--layers", "2", "--config", "x"], "--config says which layers"),
        (["--rows", "0"], "--rows is 0"),
        (["--data", str(tmp_path)], "has no *.jsonl file"),
        (["--checkpoint", str(tmp_path)], "there is no checkpoint"),
    ):
        assert cli.main([*command, *wrong]) == 2
        assert said in capsys.readouterr().err
    assert cli.main([*base, "--out", str(tmp_path / "new")]) == 2
    assert "what to capture is not said" in capsys.readouterr().err
