"""Ways to damage a checkpoint folder: name -> (what to do, what the error must say)."""

import json
import os
import struct
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
WQ_A = "layers.1.attn.wq_a"
GATE = "layers.0.ffn.gate.tid2eid"


def index_of(folder):
    return json.loads((folder / INDEX).read_text())


def edit_index(folder, change):
    index = index_of(folder)
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def edit_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_shard(folder, name, change):
    """change(tensors) on the shard that holds `name`; the index follows."""
    shard = index_of(folder)["weight_map"][name]
    tensors = {key: value.clone() for key, value in load_file(folder / shard).items()}
    before = set(tensors)
    change(tensors)
    save_file(tensors, folder / shard)

    def follow(weight_map):
        for key in before - tensors.keys():
            del weight_map[key]
        weight_map.update(dict.fromkeys(tensors, shard))

    edit_index(folder, follow)


def put(name, make):
    """Replace the tensor `name` by make(old)."""
    return lambda folder: edit_shard(folder, name, lambda tensors: tensors.update({name: make(tensors[name])}))


def rename(old, new):
    return lambda folder: edit_shard(folder, old, lambda tensors: tensors.update({new: tensors.pop(old)}))


def drop(name):
    return lambda folder: edit_shard(folder, name, lambda tensors: tensors.pop(name))


def edit_header(folder, change, *, pad=0):
    """change(header) on the first shard's header, data untouched but for `pad` zero bytes at its end."""
    path = sorted(folder.glob("*.safetensors"))[0]
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    raw = text if isinstance(text, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :] + bytes(pad))


def by_offset(header):
    return sorted((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"])


def overlap(header):
    """The second tensor starts inside the first; sizes stay right."""
    first, second = by_offset(header)[:2]
    start, stop = header[second]["data_offsets"]
    header[second]["data_offsets"] = [start - 1, stop - 1]
    assert first != second


def gap(header):
    last = by_offset(header)[-1]
    header[last]["data_offsets"] = [offset + 8 for offset in header[last]["data_offsets"]]


def wrong_size(header):
    header[by_offset(header)[0]]["shape"][0] += 1


def unknown_dtype(header):
    header[by_offset(header)[0]]["dtype"] = "F3"


def negative_shape(header):
    header[by_offset(header)[0]]["shape"] = [-1]


def repeated_key(header):
    name = by_offset(header)[0]
    return json.dumps(header).encode()[:-1] + f', "{name}": {json.dumps(header[name])}}}'.encode()


def first(**values):
    """The first tensor's entry with these values instead."""
    return lambda header: header[by_offset(header)[0]].update(values)


def as_text(old, new):
    """The header's text with the first tensor's `old` key holding `new` verbatim."""

    def change(header):
        header[by_offset(header)[0]][old] = "HERE"
        return json.dumps(header).replace('"HERE"', new).encode()

    return change


def metadata(value):
    return lambda header: header.update(__metadata__=value)


def cut(folder, keep):
    path = sorted(folder.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:keep])


def swap_shapes(folder):
    def swap(tensors):
        a, b = "layers.1.ffn.shared_experts.w1.weight", "layers.1.ffn.shared_experts.w2.weight"
        tensors[a], tensors[b] = tensors[b], tensors[a]

    edit_shard(folder, "layers.1.ffn.shared_experts.w1.weight", swap)


def in_two_shards(folder):
    names = sorted(folder.glob("*.safetensors"))
    tensors = {k: v.clone() for k, v in load_file(names[1]).items()}
    tensors["embed.weight"] = load_file(names[0])["embed.weight"].clone()
    save_file(tensors, names[1])


def unlisted(folder):
    edit_index(folder, lambda weight_map: weight_map.pop("norm.weight"))


def point(to):
    return lambda folder: edit_index(folder, lambda weight_map: weight_map.update({"norm.weight": to(folder)}))


def leaving_symlink(folder):
    shard = sorted(folder.glob("*.safetensors"))[-1]
    outside = folder.parent / f"outside-{folder.name}"
    shard.rename(outside)
    shard.symlink_to(outside)


def set_table(row, values):
    def make(table):
        table[row, : len(values)] = torch.tensor(values)
        return table

    return put(GATE, make)


def replaced_by(name, make):
    """Something else in the place of a file: make(path)."""

    def change(folder):
        (folder / name).unlink()
        make(folder / name)

    return change


def ring(path):
    other = path.with_name("ring")
    other.symlink_to(path)
    path.symlink_to(other)


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def tokenizer(**values):
    return lambda folder: edit_json(folder / "tokenizer.json", **values)


def masked_beyond(folder):
    """A word beyond the vocabulary under the name of an added token whose id is fine."""
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"]["vocab"][raw["added_tokens"][0]["content"]] = 9999
    path.write_text(json.dumps(raw))


def sparse(name, size):
    def change(folder):
        with (folder / name).open("r+b") as file:
            file.truncate(size)

    return change


def tokenizer_beyond(folder):
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["added_tokens"][-1]["id"] = 264
    path.write_text(json.dumps(raw))


def dspark(**values):
    keys = {
        "dspark_block_size": 3,
        "dspark_noise_token_id": 262,
        "dspark_target_layer_ids": [2, 3, 4],
        "dspark_markov_rank": 8,
    }
    return lambda folder: edit_json(folder / "config.json", **(keys | values))


def nan_byte(scale):
    raw = scale.view(torch.uint8)
    raw[0, 0] = 255
    return raw.view(torch.float8_e8m0fnu)


def nan_code(codes):
    raw = codes.view(torch.uint8)
    raw[1, 1] = 127
    return raw.view(torch.float8_e4m3fn)


def many_missing(folder):
    def change(tensors):
        for name in [k for k in tensors if ".experts." in k and k.endswith("w1.weight")][:9]:
            del tensors[name], tensors[name.replace(".weight", ".scale")]

    edit_shard(folder, "layers.0.ffn.experts.0.w1.weight", change)


def absurd_length(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])


HEADER_FAULTS = {
    "file shorter than its header": (lambda f: cut(f, -100), "shorter than its header says"),
    "file cut inside its header": (lambda f: cut(f, 40), "header of .* cut off or damaged"),
    "empty file": (lambda f: cut(f, 0), "shorter than a safetensors header"),
    "header length absurd": (absurd_length, "cut off or damaged"),
    "file longer than its header": (lambda f: edit_header(f, lambda h: None, pad=7), "longer than its header says"),
    "overlapping offsets": (lambda f: edit_header(f, overlap), "overlaps"),
    "gap between offsets": (lambda f: edit_header(f, gap, pad=8), "gap of 8 bytes"),
    "size unlike dtype and shape": (lambda f: edit_header(f, wrong_size), "bytes, .* takes"),
    "unknown dtype": (lambda f: edit_header(f, unknown_dtype), "dtype 'F3', allowed"),
    "negative shape": (lambda f: edit_header(f, negative_shape), r"shape \[-1\], allowed"),
    "header not JSON": (lambda f: edit_header(f, lambda h: b"{nothing"), "header: not JSON"),
    "header is a list": (lambda f: edit_header(f, lambda h: b"[1]"), "allowed: an object"),
    "header nests without end": (lambda f: edit_header(f, lambda h: b"[" * 200_000), "header: not JSON"),
    "name twice in a header": (lambda f: edit_header(f, repeated_key), "names repeated"),
    "dtype is a number": (lambda f: edit_header(f, first(dtype=7)), "dtype 7, allowed"),
    "dtype nests deeply": (lambda f: edit_header(f, as_text("dtype", "[" * 800 + "]" * 800)), "dtype .*, allowed"),
    "shape is an object": (lambda f: edit_header(f, first(shape={})), "shape {}, allowed"),
    "shape of a truth": (lambda f: edit_header(f, first(shape=[True])), r"shape \[True\], allowed"),
    "shape of NaN": (lambda f: edit_header(f, as_text("shape", "[NaN]")), r"shape \[nan\], allowed"),
    "shape of thousands of digits": (
        lambda f: edit_header(f, as_text("shape", f"[{'9' * 4000}, {'9' * 4000}]")),
        "shape .an integer of 13288 bits.*, allowed",
    ),
    "digits without end": (lambda f: edit_header(f, as_text("shape", f"[{'9' * 5000}]")), "header: not JSON"),
    "shape of many sizes": (lambda f: edit_header(f, first(shape=[1 << 40] * 100_000)), "shape .*at most 8 whole"),
    "offsets of many": (lambda f: edit_header(f, first(data_offsets=[1] * 100_000)), "data_offsets .*allowed"),
    "one offset": (lambda f: edit_header(f, first(data_offsets=[0])), "data_offsets .*, allowed: two"),
    "offsets turned about": (lambda f: edit_header(f, first(data_offsets=[64, 0])), "has -64 bytes"),
    "entry is text": (lambda f: edit_header(f, lambda h: h.update(x="y")), "header entry of x is no object"),
    "metadata of numbers": (lambda f: edit_header(f, metadata({"format": 1})), "__metadata__ is .*, allowed"),
    "metadata is a list": (lambda f: edit_header(f, metadata([1])), "__metadata__ is .*, allowed"),
    "header is no UTF-8": (lambda f: edit_header(f, lambda h: b'{"\xff": 1}'), "header: not JSON"),
}
INDEX_FAULTS = {
    "shard absent": (lambda f: sorted(f.glob("*.safetensors"))[1].unlink(), "00002-of-.*absent"),
    "entry whose tensor is absent": (
        lambda f: edit_index(f, lambda m: m.update({"layers.9.x": m["norm.weight"]})),
        "not in its shard: layers.9.x",
    ),
    "tensor not in the index": (unlisted, "lacks tensors.*norm.weight"),
    "tensor in two shards": (in_two_shards, "two shards: embed.weight in .*00001.* and .*00002"),
    "no index, several shards": (lambda f: (f / INDEX).unlink(), "shards .* but no model.safetensors.index.json"),
    "absolute path": (point(lambda f: str(f / "model-00001-of-00004.safetensors")), "allowed: plain file names"),
    "path with dots": (point(lambda f: "../x.safetensors"), "allowed: plain file names"),
    "path of dots": (point(lambda f: ".."), "allowed: plain file names"),
    "folder as shard": (lambda f: [(f / "sub").mkdir(), point(lambda f: "sub")(f)], "not a file"),
    "shard is no name": (point(lambda f: 7), "-> 7, allowed: a file name"),
    "symlink out of the folder": (leaving_symlink, "leads out of the folder"),
    "symlinks in a ring": (replaced_by("model-00002-of-00004.safetensors", ring), "00002-of.*absent"),
    "pipe as shard": (replaced_by("model-00002-of-00004.safetensors", os.mkfifo), "00002-of.*not a file"),
    "shard name no file can have": (point(lambda f: "\ud800.safetensors"), "allowed: plain file names"),
    "shard name that moves the cursor": (point(lambda f: "\x1b[2J"), "allowed: plain file names"),
    "shard name without end": (point(lambda f: "x" * 5000), "shard x{200}... of the index is absent"),
    "empty shard name": (point(lambda f: ""), "allowed: plain file names"),
    "pipe as index": (replaced_by(INDEX, os.mkfifo), "index.json: not a file"),
    "folder as index": (replaced_by(INDEX, Path.mkdir), "index.json: not a file"),
    "index maps to a list": (write(INDEX, '{"weight_map": ["a"]}'), "weight_map is absent or empty"),
    "index maps to null": (write(INDEX, '{"weight_map": null}'), "weight_map is absent or empty"),
    "index nests deeply": (
        write(INDEX, f'{{"weight_map": {{"a": {"[" * 800}{"]" * 800}}}}}'),
        "a -> .*, allowed: a file name",
    ),
    "index of thousands of digits": (write(INDEX, f'{{"weight_map": {"9" * 5000}}}'), "index.json: not JSON"),
    "index not JSON": (lambda f: (f / INDEX).write_text("{"), "not JSON"),
    "index is a list": (lambda f: (f / INDEX).write_text("[]"), "allowed: an object"),
    "index without a map": (lambda f: (f / INDEX).write_text("{}"), "weight_map is absent"),
    "index repeats a name": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}'),
        "names repeated: a",
    ),
}
NAME_FAULTS = {
    "missing": (drop("layers.1.attn_norm.weight"), r"missing \(1\): layers.1.attn_norm.weight"),
    "many missing": (many_missing, r"missing \(9\): .*w1.weight.* and 4 more"),
    "unexpected": (
        lambda f: edit_shard(f, "norm.weight", lambda t: t.update({"layers.7.norm": torch.zeros(2)})),
        r"unexpected \(1\): layers.7.norm",
    ),
    "renamed": (rename("head.weight", "lm_head.weight"), "missing .*: head.weight; unexpected .*: lm_head.weight"),
    "misshaped": (put("layers.1.attn.attn_sink", lambda t: t[:-1].clone()), r"wrong shape.*attn_sink \(7,\)"),
    "two shapes swapped": (swap_shapes, r"wrong shape \(2\)"),
    "wrongly typed": (put("norm.weight", lambda t: t.float()), "wrong dtype.*norm.weight F32, allowed BF16"),
    "codes as plain integers": (
        put(f"{WQ_A}.weight", lambda t: t.view(torch.int8)),
        "wrong dtype.*wq_a.weight I8, allowed F8_E4M3",
    ),
    "one expert in another form": (
        put("layers.1.ffn.experts.3.w2.weight", lambda t: torch.zeros(64, 32).to(torch.float8_e4m3fn)),
        "wrong dtype.*experts.3.w2.weight F8_E4M3, allowed I8",
    ),
    "weight without a scale": (drop(f"{WQ_A}.scale"), r"weights without a scale \(1\): .*wq_a.weight"),
    "scale without a weight": (drop(f"{WQ_A}.weight"), r"scales without a weight \(1\): .*wq_a.scale"),
    "scale of a plain weight": (
        lambda f: edit_shard(f, "norm.weight", lambda t: t.update({"norm.scale": torch.ones(1, 1)})),
        "unexpected.*norm.scale",
    ),
    "scale transposed": (
        put("layers.1.attn.indexer.wq_b.scale", lambda t: t.view(torch.uint8).mT.contiguous()),
        r"wrong shape.*indexer.wq_b.scale \(1, 6\), allowed \(6, 1\)",
    ),
    "scale of wrong dtype": (
        put(f"{WQ_A}.scale", lambda t: t.float().bfloat16()),
        "wrong dtype.*wq_a.scale BF16, allowed F8_E8M0",
    ),
    "two scales": (
        lambda f: edit_shard(f, f"{WQ_A}.scale", lambda t: t.update({f"{WQ_A}.weight_scale_inv": torch.ones(1, 1)})),
        "two scales",
    ),
    "drafter of no config": (
        lambda f: edit_shard(f, "norm.weight", lambda t: t.update({"mtp.3.norm.weight": t["norm.weight"].clone()})),
        "unexpected.*mtp.3.norm.weight",
    ),
}
VALUE_FAULTS = {
    "hash table too high": (set_table(5, [16]), r"tid2eid holds expert 16 \(token 5\), allowed: 0 to 15"),
    "hash table negative": (set_table(263, [-1]), r"holds expert -1 \(token 263\)"),
    "hash table repeats": (set_table(9, [3, 3]), "repeats an expert in the row of token 9"),
    "eos beyond the vocabulary": (lambda f: edit_json(f / "config.json", eos_token_id=264), "eos_token_id is 264"),
    "noise beyond the vocabulary": (dspark(dspark_noise_token_id=264), "dspark_noise_token_id is 264"),
    "target layer beyond the model": (dspark(dspark_target_layer_ids=[5]), r"dspark_target_layer_ids\[0\] is 5"),
    "tokenizer beyond the vocabulary": (tokenizer_beyond, "tokenizer.json: ids beyond the vocabulary"),
    "tokenizer of nothing": (write("tokenizer.json", "{}"), "tokenizer.json: model.vocab is None, allowed"),
    "tokenizer not JSON": (write("tokenizer.json", "hello"), "tokenizer.json: not JSON"),
    "tokenizer is a list": (write("tokenizer.json", "[]"), "tokenizer.json: a JSON list, allowed: an object"),
    "tokenizer without words": (tokenizer(model={"vocab": {}}), "tokenizer.json: model.vocab is {}, allowed"),
    "tokenizer's model is a list": (tokenizer(model=[1]), "tokenizer.json: model.vocab is None, allowed"),
    "tokenizer of truths": (tokenizer(model={"vocab": {"a": True}}), "beyond the vocabulary.*'a' True"),
    "tokenizer adds a text": (tokenizer(added_tokens="x"), "added_tokens is 'x', allowed"),
    "tokenizer hides a word beyond": (masked_beyond, "ids beyond the vocabulary.* 9999"),
    "tokenizer too large": (sparse("tokenizer.json", (128 << 20) + 1), "134217729 bytes, allowed: at most 134217728"),
    "tokenizer leads nowhere": (
        replaced_by("tokenizer.json", lambda p: p.symlink_to("gone")),
        "tokenizer.json: cannot be read",
    ),
    "pipe as config": (replaced_by("config.json", os.mkfifo), "config.json: not a file"),
    "config too large": (sparse("config.json", (1 << 20) + 1), "1048577 bytes, allowed: at most 1048576"),
    "config nests without end": (write("config.json", '{"a":' * 100_000), "config.json: not JSON"),
    "config nests deeply": (
        lambda f: edit_json(f / "config.json", expert_dtype=json.loads("[" * 800 + "]" * 800)),
        "config.json: expert_dtype is .*, allowed: .'fp4'",
    ),
    "config of thousands of digits": (write("config.json", f'{{"a": {"9" * 5000}}}'), "config.json: not JSON"),
    "config of too many layers": (
        lambda f: edit_json(f / "config.json", num_hidden_layers=10**7),
        "num_hidden_layers is 10000000, allowed: a whole number from 1 to 1024",
    ),
    "config with a list for an object": (
        lambda f: edit_json(f / "config.json", quantization_config=[1]),
        r"config.json: quantization_config is \[1\], allowed",
    ),
    "width that FP4 cannot pack": (
        lambda f: edit_json(f / "config.json", moe_intermediate_size=33),
        "moe_intermediate_size is 33, allowed with fp4 experts: multiples of 32",
    ),
    "config absent": (lambda f: (f / "config.json").unlink(), "config.json: cannot be read"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
    "config of nonsense": (lambda f: edit_json(f / "config.json", hidden_size="x"), "config.json: hidden_size"),
    "scale byte is NaN": (put(f"{WQ_A}.scale", nan_byte), "scale layers.1.attn.wq_a.scale holds NaN"),
    "float scale is NaN": (
        put(f"{WQ_A}.scale", lambda t: torch.full((1, 1), torch.nan)),
        "scale layers.1.attn.wq_a.scale holds NaN",
    ),
    "weight code is NaN": (put(f"{WQ_A}.weight", nan_code), "wq_a.weight holds NaN"),
    "plain weight is infinite": (put("norm.weight", lambda t: t * torch.inf), "norm.weight holds NaN or infinity"),
}
FAULTS = HEADER_FAULTS | INDEX_FAULTS | NAME_FAULTS | VALUE_FAULTS


def plant(name: str, folder: Path) -> str:
    """Damage the folder; the pattern that the error must match."""
    change, pattern = FAULTS[name]
    change(folder)
    return pattern
