"""Block by block with a cache is the same as all blocks at once; dense kinds against transformers."""

from dataclasses import replace

import pytest
import torch
from draft_attention_scene import KINDS, Blocks, attention, blocks, config, run

from meshspark.models.drafts.attention import attention_context
from meshspark.models.drafts.cache import ContextCache


def block_by_block(made, given: Blocks) -> torch.Tensor:
    """One block a call, in order; each call brings the context rows up to the furthest anchor of its samples."""
    cache, outputs, held = ContextCache(), [], 0
    for block in range(given.anchors.shape[1]):
        upto = max(held, int(given.anchors[:, block].max()))
        rows = slice(block * given.size, (block + 1) * given.size)
        context = attention_context(
            [made],
            given.anchors[:, block, None],
            given.keep[:, block, None],
            given.positions[:, :upto],
            given.size,
            cache,
        )
        outputs.append(made(given.hidden[:, rows], given.context[:, held:upto], context))
        held = upto
        assert cache.length(made.layer_idx) == held
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"attention_backend": "eager"},
        {"attention_backend": "native"},
        {"attention_backend": "eager", "context_window": None},
        {"attention_backend": "eager", "sliding_window": 3, "layer_types": ("full_attention", "sliding_attention")},
    ],
)
def test_block_by_block_is_one_pass(mode, changes):
    made = attention(config(mode, **changes), layer_idx=1)
    given = blocks([[0, 2, 2, 7], [1, 3, 6, 9]], [[1, 1, 1, 1], [1, 1, 0, 1]], rows=9)
    with torch.no_grad():
        torch.testing.assert_close(block_by_block(made, given), run(made, given), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mode", ["gqa", "mla"])
def test_block_by_block_on_sdpa(mode):
    made = attention(config(mode, attention_backend="sdpa"))
    given = blocks([[0, 2, 7]], [[1, 1, 1]], rows=9)
    with torch.no_grad():
        torch.testing.assert_close(block_by_block(made, given), run(made, given), rtol=1e-12, atol=1e-13)


def test_cache_keeps_layers_apart_and_crops():
    cache = ContextCache()
    first, second = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 2, 4)
    cache.append(0, first, first)
    keys, values = cache.append(0, second, second)
    assert torch.equal(keys, torch.cat((first, second), dim=2)) and torch.equal(keys, values)
    cache.append(1, first)
    assert (cache.length(0), cache.length(1), cache.length(2)) == (5, 3, 0)
    cache.crop(4)
    assert (cache.length(0), cache.length(1)) == (4, 3)
    (kept,) = cache.append(1, second[:, :, :0])
    assert torch.equal(kept, first)
    with pytest.raises(ValueError, match="length -1"):
        cache.crop(-1)


def causal_text(made, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A causal block from position 0 without context: what a language model's attention does with a text."""
    text = blocks([[0]], [[1]], rows=0, size=rows)
    return text.hidden, run(made, replace(text))


def test_gqa_is_qwen3s_attention():
    qwen = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    made = attention(config("gqa", is_causal=True, attention_backend="eager", context_window=None))
    theirs_config = qwen.Qwen3Config(
        hidden_size=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )
    theirs = qwen.Qwen3Attention(theirs_config, 0).double().eval()
    theirs.load_state_dict(made.state_dict())
    compare_with(theirs, qwen.Qwen3RotaryEmbedding(theirs_config), made)


def test_mla_is_deepseek_v3s_attention():
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    made = attention(config("mla", is_causal=True, attention_backend="eager", context_window=None))
    theirs_config = deepseek.DeepseekV3Config(
        hidden_size=12,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=6,
        kv_lora_rank=5,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=6,
        rms_norm_eps=1e-6,
        rope_interleave=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )
    theirs = deepseek.DeepseekV3Attention(theirs_config, 0).double().eval()
    theirs.load_state_dict(made.state_dict())
    compare_with(theirs, deepseek.DeepseekV3RotaryEmbedding(theirs_config), made)


def compare_with(theirs, rotary, made) -> None:
    with torch.no_grad():
        hidden, found = causal_text(made, 7)
        turns = rotary(hidden.float(), torch.arange(7).unsqueeze(0))
        mask = torch.full((7, 7), float("-inf"), dtype=torch.float64).triu(1).view(1, 1, 7, 7)
        expected = theirs(hidden, position_embeddings=tuple(part.double() for part in turns), attention_mask=mask)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
