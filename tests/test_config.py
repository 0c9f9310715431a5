"""config.json is untrusted: whatever it holds, from_config_json gives a valid shape or one ValueError, quickly."""

import json
import math
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshspark.models.v4.config import (
    PRESETS,
    DSparkFields,
    V4Config,
    YarnScaling,
    flash,
    from_config_json,
    pro,
    tiny,
)
from meshspark.models.v4.rope import frequencies

DEEP = json.loads("[" * 900 + "]" * 900)
VALID = {name: make().to_json() for name, make in PRESETS.items()}
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([10**8, 10**10 + 1, 10**400, -1, 0, 1, 1e-320, 1e308, math.nan, math.inf, True]),
)
# Mapped, for hypothesis would write these values themselves into the names of strategies.
UNWRITABLE = st.booleans().map(lambda deep: DEEP if deep else 10**6000)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), UNWRITABLE),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=6,
)
PARENTS = ("rope_scaling", "quantization_config")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_their_json(name, tmp_path):
    config = PRESETS[name]()
    assert from_config_json(json.loads(json.dumps(config.to_json()))) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    assert from_config_json(tmp_path / "config.json") == config


def test_integers_stand_for_floats_and_unknown_keys_are_ignored():
    raw = VALID["tiny"] | {"swiglu_limit": 1, "rope_theta": 10000, "transformers_version": DEEP}
    config = from_config_json(raw)
    assert config == tiny() and isinstance(config.swiglu_limit, float) and isinstance(config.rope_theta, float)


def test_drafter_keys_that_are_null_are_absent():
    nothing = dict.fromkeys(key for key in VALID["flash-dspark"] if key.startswith("dspark_"))
    assert from_config_json(VALID["flash"] | nothing) == flash()


@st.composite
def mutated(draw):
    """A preset's JSON with one to three keys, or items of a nested value, set to anything."""
    raw = json.loads(json.dumps(VALID[draw(st.sampled_from(sorted(VALID)))]))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from([raw, *(raw[key] for key in PARENTS if isinstance(raw[key], dict) and raw[key])]))
        key = draw(st.sampled_from(sorted(place)))
        if isinstance(place[key], list) and place[key] and draw(st.booleans()):
            place[key][draw(st.integers(0, len(place[key]) - 1))] = draw(JSON)
        else:
            place[key] = draw(JSON)
    return raw


# The deadline is that of one case; a value of thousands of levels or digits must not take longer either.
@settings(max_examples=250, deadline=timedelta(seconds=2))
@given(mutated())
def test_anything_is_a_valid_config_or_a_value_error(raw):
    try:
        config = from_config_json(raw)
    except ValueError as error:
        assert str(error).isascii() and len(str(error)) < 3000
        assert " is " in str(error) or " has " in str(error)
        return
    assert from_config_json(config.to_json()) == config
    assert len(config.kinds) == config.num_hidden_layers
    for ratio in (0, 4):
        assert bool(frequencies(config, ratio).isfinite().all())


@settings(max_examples=100, deadline=timedelta(seconds=2))
@given(st.dictionaries(st.sampled_from(sorted(VALID["flash-dspark"])), JSON, max_size=5))
def test_any_object_is_a_valid_config_or_a_value_error(raw):
    with suppress(ValueError):
        from_config_json(raw)


DAMAGE = [
    ({"quantization_config": [1]}, r"quantization_config is \[1\], allowed: an object"),
    ({"quantization_config": {"weight_block_size": 5}}, "weight_block_size is 5, allowed: two"),
    ({"quantization_config": {"weight_block_size": ["a", 1]}}, r"weight_block_size\[0\] is 'a', allowed: a whole"),
    ({"quantization_config": {"weight_block_size": [128, 0]}}, r"weight_block_size\[1\] is 0, allowed"),
    ({"quantization_config": {"weight_block_size": [128.0, 128]}}, r"weight_block_size\[0\] is 128.0, allowed"),
    ({"quantization_config": {"weight_block_size": None}}, "weight_block_size is None, allowed"),
    ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', allowed: an object"),
    ({"rope_scaling": {"type": ["yarn"]}}, r"rope_scaling.type is \['yarn'\], allowed"),
    ({"rope_scaling": {"type": "yarn", "factor": 0}}, "rope_scaling.factor is 0, allowed: a number from 1.0"),
    ({"rope_scaling": {"type": "yarn", "factor": math.inf}}, "rope_scaling.factor is inf, allowed"),
    ({"rope_scaling": {"type": "yarn", "beta_slow": 0}}, "rope_scaling.beta_slow is 0, allowed"),
    ({"rope_scaling": {"type": "yarn", "beta_fast": -1}}, "rope_scaling.beta_fast is -1, allowed"),
    ({"rope_scaling": {"type": "yarn", "beta_fast": 1, "beta_slow": 32}}, "beta_slow is 32.0, allowed: at most"),
    (
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}},
        "rope_scaling.original_max_position_embeddings is 0, allowed: a whole number from 1",
    ),
    ({"compress_ratios": [False, 4, 128, 4, 0]}, r"compress_ratios\[0\] is False, allowed: \[0, 4, 128\]"),
    ({"compress_ratios": [0, 4, 128, 4, []]}, r"compress_ratios\[4\] is \[\], allowed"),
    ({"compress_ratios": [0] * 100_000}, "99995 entries beyond num_hidden_layers 5, allowed: at most 64"),
    ({"compress_ratios": 7}, "compress_ratios is 7, allowed: a list"),
    ({"num_attention_heads": 10**10 + 1}, "num_attention_heads is 10000000001, allowed: a whole number"),
    ({"num_attention_heads": 9}, r"legal o_groups: \[1, 3, 9\]"),
    ({"n_routed_experts": 10**8}, "n_routed_experts is 100000000, allowed"),
    ({"n_routed_experts": 1 << 14, "compress_ratios": [0] * 9}, "n_routed_experts is 16384, allowed: at most 14563"),
    ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000, allowed"),
    ({"num_hidden_layers": -3}, "num_hidden_layers is -3, allowed"),
    ({"vocab_size": 10**5000}, "vocab_size is an integer of 16610 bits, allowed"),
    ({"rope_theta": 10**5000}, "rope_theta is an integer of 16610 bits, allowed"),
    ({"hidden_size": True}, "hidden_size is True, allowed: a whole number"),
    ({"hidden_size": 64.0}, "hidden_size is 64.0, allowed: a whole number"),
    ({"num_key_value_heads": True}, "num_key_value_heads is True, allowed: 1"),
    ({"tie_word_embeddings": 0}, "tie_word_embeddings is 0, allowed: False"),
    ({"expert_dtype": DEEP}, "expert_dtype is .*, allowed: .'fp4'"),
    ({"expert_dtype": "\x1b[2J\ud800" + "x" * 9000}, "expert_dtype is .*, allowed: .'fp4'"),
    ({"model_type": DEEP}, "model_type is .*, allowed: 'deepseek_v4'"),
    ({"eos_token_id": 264}, "eos_token_id is 264, allowed: a whole number from 0 to 263"),
    ({"eos_token_id": [1]}, r"eos_token_id is \[1\], allowed"),
    ({"num_hash_layers": 6}, "num_hash_layers is 6, allowed: a whole number from 0 to 5"),
    ({"n_shared_experts": 2}, "n_shared_experts is 2, allowed: 1"),
]


@pytest.mark.parametrize(("values", "pattern"), DAMAGE)
def test_damage_names_key_value_and_what_is_allowed(values, pattern):
    with pytest.raises(ValueError, match=pattern) as caught:
        from_config_json(VALID["tiny"] | values)
    assert len(str(caught.value)) < 500


FLOATS = ["rope_theta", "compress_rope_theta", "rms_norm_eps", "hc_eps", "swiglu_limit", "routed_scaling_factor"]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "0", "0.0", "-1.5", "1e-320", "1e999", "true", '"1"']
)
def test_floats_are_finite_and_positive(name, value):
    """As Python's JSON reads them: its NaN and Infinity are numbers."""
    raw = json.loads(json.dumps(VALID["tiny"] | {name: "HERE"}).replace('"HERE"', value))
    with pytest.raises(ValueError, match=f"^{name} is .*, allowed: a number from"):
        from_config_json(raw)


DRAFTER_DAMAGE = [
    ({"dspark_block_size": "x"}, "dspark_block_size is 'x', allowed: a whole number from 1"),
    ({"dspark_block_size": 0}, "dspark_block_size is 0, allowed"),
    ({"dspark_markov_rank": 0}, "dspark_markov_rank is 0, allowed"),
    ({"dspark_markov_rank": 1.5}, "dspark_markov_rank is 1.5, allowed"),
    ({"dspark_target_layer_ids": 5}, "dspark_target_layer_ids is 5, allowed: a list"),
    ({"dspark_target_layer_ids": []}, r"dspark_target_layer_ids is \(\), allowed: a list of layers, one at least"),
    (
        {"dspark_target_layer_ids": [40, 43]},
        r"dspark_target_layer_ids\[1\] is 43, allowed: a whole number from 0 to 42",
    ),
    ({"dspark_target_layer_ids": [-1]}, r"dspark_target_layer_ids\[0\] is -1, allowed"),
    ({"dspark_target_layer_ids": [[1]]}, r"dspark_target_layer_ids\[0\] is \[1\], allowed"),
    ({"dspark_target_layer_ids": [40, 40]}, "dspark_target_layer_ids .* allowed: no layer twice"),
    ({"dspark_noise_token_id": 129280}, "dspark_noise_token_id is 129280, allowed: a whole number from 0 to 129279"),
    ({"dspark_noise_token_id": False}, "dspark_noise_token_id is False, allowed"),
    ({"dspark_block_size": None}, r"lacks \['dspark_block_size'\]"),
]


@pytest.mark.parametrize(("values", "pattern"), DRAFTER_DAMAGE)
def test_damaged_drafter_keys(values, pattern):
    with pytest.raises(ValueError, match=pattern):
        from_config_json(VALID["flash-dspark"] | values)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("{", "not a readable config.json"),
        ("[1]", "not a JSON object"),
        ('{"a":' * 100_000, "not a readable config.json: .*recursion"),
        (f'{{"vocab_size": {"9" * 5000}}}', "not a readable config.json: .*digits"),
        (" " * ((1 << 20) + 1), "larger than 1048576 bytes"),
    ],
)
def test_files_that_hold_no_config(tmp_path, text, pattern):
    path = tmp_path / "config.json"
    with pytest.raises(ValueError, match="no such file"):
        from_config_json(path)
    path.write_text(text)
    with pytest.raises(ValueError, match=pattern) as caught:
        from_config_json(path)
    assert str(path) in str(caught.value)


def test_shapes_made_in_code_keep_the_same_rules():
    for values in ({"hidden_size": "x"}, {"hc_eps": math.nan}, {"yarn": YarnScaling(factor=0.0)}, {"hc_mult": 2.0}):
        with pytest.raises(ValueError, match="allowed"):
            replace(tiny(), **values)
    with pytest.raises(ValueError, match="dspark_noise_token_id is 264"):
        replace(tiny(), dspark=DSparkFields(3, 264, (1,), 8, 0))


def test_limits_leave_room_above_the_largest_model():
    """Four times Pro in any one number that sets a size."""
    sizes = ["hidden_size", "vocab_size", "head_dim", "q_lora_rank", "o_lora_rank", "sliding_window", "index_n_heads"]
    sizes += ["index_head_dim", "index_topk", "moe_intermediate_size", "n_routed_experts", "num_attention_heads"]
    for name in [*sizes, "hc_mult", "max_position_embeddings"]:
        assert getattr(replace(pro(), **{name: 4 * getattr(pro(), name)}), name) == 4 * getattr(pro(), name)
    assert isinstance(replace(pro(), num_hidden_layers=244, compress_ratios=pro().compress_ratios * 4), V4Config)
