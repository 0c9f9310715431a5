"""Attention of drafts against loops, across kinds, backends and places of blocks."""

import inspect
from dataclasses import replace

import pytest
import torch
from draft_attention_scene import (
    DENSE,
    KINDS,
    WINDOW,
    attention,
    blocks,
    config,
    edge_blocks,
    on,
    run,
    without_compiler,
)
from naive_draft_attention import attend_row, naive_attention
from torch.nn.attention.varlen import varlen_attn

from meshspark.models.drafts.attention import AttentionConfig, attention_context
from meshspark.models.drafts.backends import eager
from meshspark.models.drafts.flash import by_sequences
from meshspark.models.drafts.kinds import build_attention
from meshspark.models.drafts.masks import MaskRule
from meshspark.models.drafts.plans import choose_backend, make_plan

LAYERS = {
    "window": {},
    "no window": {"context_window": None},
    "causal": {"is_causal": True},
    "sliding": {"context_window": None, "sliding_window": 5, "layer_types": ("sliding_attention",)},
    "both": {"sliding_window": 3, "layer_types": ("sliding_attention",)},
}


@pytest.fixture(autouse=True)
def _plain_flex(monkeypatch):
    without_compiler(monkeypatch)


def gradients(output: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    probe = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).sin()
    return dict(zip(inputs, torch.autograd.grad((output * probe).sum(), list(inputs.values())), strict=True))


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_kind_is_the_loops_with_every_gradient(mode, backend):
    sinks = {"attention_sinks": True} if mode == "mla" else {}
    made = attention(config(mode, attention_backend=backend, **sinks))
    given = blocks([[0, 3, 7], [5, 2, 1]], [[1, 1, 1], [1, 0, 1]], rows=7, size=2)
    given.hidden.requires_grad_()
    given.context.requires_grad_()
    inputs = dict(made.named_parameters()) | {"hidden": given.hidden, "context": given.context}
    assert ("sinks" in inputs) == (mode in ("deepseek_v4", "deepseek_v41", "mla"))
    naive = naive_attention(
        made.config, made.rule, dict(made.named_parameters()), given.hidden, given.context, *given.places()
    )
    output = run(made, given)
    torch.testing.assert_close(output, naive, rtol=1e-12, atol=1e-12)
    expected, found = gradients(naive, inputs), gradients(output, inputs)
    for name in inputs:
        assert expected[name].abs().max() > 1e-3, name
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("layer", LAYERS)
def test_backends_agree_at_the_edges(mode, layer):
    made = attention(config(mode, attention_backend="eager", **LAYERS[layer]))
    given = edge_blocks()
    with torch.no_grad():
        expected = run(made, given)
        blind = expected.unflatten(1, (-1, given.size))[~given.keep]
        silent = 0 if mode != "mha" else made.o_proj.bias
        assert (blind == silent).all()
        for backend in ("sdpa", "flex", "native"):
            if backend == "sdpa" and mode not in DENSE:
                continue
            if backend == "native" and made.rule.context_window is None:
                continue
            found = run(on(made, backend), given)
            assert not found.isnan().any()
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13, msg=lambda m, b=backend: f"{b}: {m}")


@pytest.mark.parametrize("mode", ["gqa", "deepseek_v4"])
def test_gradients_agree_at_the_edges(mode):
    plain = attention(config(mode, attention_backend="eager", sliding_window=3, layer_types=("sliding_attention",)))
    given = edge_blocks()
    given.context.requires_grad_()
    results = {}
    for backend in ("eager", "native", "sdpa"):
        if backend == "sdpa" and mode not in DENSE:
            continue
        made = on(plain, backend)
        results[backend] = gradients(run(made, given), dict(made.named_parameters()) | {"context": given.context})
    expected = results.pop("eager")
    assert (expected["context"][0, WINDOW:] == 0).all()
    for backend, found in results.items():
        for name, gradient in found.items():
            assert gradient.isfinite().all()
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12, msg=f"{backend} {name}")


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("backend", ["eager", "native", "flex"])
def test_without_context_or_without_blocks(mode, backend):
    made = attention(config(mode, attention_backend=backend))
    with torch.no_grad():
        alone = run(made, blocks([[0, 4]], [[1, 1]], rows=0))
        torch.testing.assert_close(alone[:, :3], run(on(made, "eager"), blocks([[0, 4]], [[1, 1]], rows=0))[:, :3])
        torch.testing.assert_close(alone[:, :3], run(on(made, "eager"), blocks([[0, 4]], [[1, 1]], rows=9))[:, :3])
    nothing = replace(
        blocks([[3]], [[1]], rows=5),
        anchors=torch.zeros(1, 0, dtype=torch.int64),
        keep=torch.zeros(1, 0, dtype=torch.bool),
        hidden=torch.zeros(1, 0, 12, dtype=torch.float64),
    )
    output = run(made, nothing)
    assert output.shape == (1, 0, 12)
    output.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in made.parameters())


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_shift_of_all_positions_changes_nothing(mode, dtype, tolerance):
    made = attention(config(mode)).to(dtype)
    near, far = blocks([[6, 2]], [[1, 1]], rows=8), blocks([[100006, 100002]], [[1, 1]], rows=8, first=100000)
    with torch.no_grad():
        outputs = [run(made, replace(b, hidden=b.hidden.to(dtype), context=b.context.to(dtype))) for b in (near, far)]
        torch.testing.assert_close(*outputs, rtol=tolerance, atol=tolerance)
        moved = replace(near, positions=near.positions - 1, anchors=near.anchors)
        assert (run(made.double(), moved) - run(made.double(), near)).abs().max() > 1e-3


@pytest.mark.parametrize("backend", ["eager", "native", "flex"])
def test_packed_context_is_the_whole_context(backend):
    """Rows that no block sees may be left out, and rows of padding put after the last."""
    made = attention(config("deepseek_v4", attention_backend=backend))
    given = blocks([[6, 20]], [[1, 1]], rows=24)
    index = torch.tensor([2, 3, 4, 5, 16, 17, 18, 19, 0, 0])
    beyond = torch.iinfo(torch.int64).max
    positions = given.positions[:, index].clone()
    positions[:, 8:] = beyond
    packed = replace(given, context=given.context[:, index], positions=positions)
    with torch.no_grad():
        torch.testing.assert_close(run(made, packed), run(made, given), rtol=1e-12, atol=1e-13)


def test_native_gathers_a_number_of_rows_that_the_context_does_not_change():
    made = attention(config("deepseek_v4", attention_backend="native"))
    projected = []
    made.kv_proj.register_forward_hook(lambda module, inputs, output: projected.append(inputs[0].shape[1]))
    for rows in (3, 7, 100, 5000):
        given = blocks([[rows, rows // 2]], [[1, 1]], rows=rows)
        plan = make_plan(made.rule, "native", *given.places())
        assert plan.index_BNW.shape == (1, 2, min(rows, WINDOW))
        assert plan.visible_BNbL.shape == (1, 2, 3, min(rows, WINDOW) + 3)
        projected.clear()
        with torch.no_grad():
            found = run(made, given)
            assert sorted(projected) == sorted([6, min(rows, 2 * WINDOW)])
            torch.testing.assert_close(found, run(on(made, "eager"), given), rtol=1e-12, atol=1e-13)


def test_v4_shapes_and_names():
    flash = AttentionConfig(
        attention_mode="deepseek_v4",
        hidden_size=4096,
        num_attention_heads=64,
        num_key_value_heads=1,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1024,
        o_groups=8,
        o_lora_rank=1024,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        context_window=128,
    )
    newer = replace(flash, attention_mode="deepseek_v41", hidden_size=5120, q_lora_rank=1280, rms_norm_eps=1e-20)
    for settings, hidden, rank, head_norm in ((flash, 4096, 1024, True), (newer, 5120, 1280, False)):
        with torch.device("meta"):
            made = build_attention(settings, 2)
        assert made.q_head_norm is head_norm
        assert {name: tuple(value.shape) for name, value in made.state_dict().items()} == {
            "q_a_proj.weight": (rank, hidden),
            "q_a_norm.weight": (rank,),
            "q_b_proj.weight": (64 * 512, rank),
            "kv_proj.weight": (512, hidden),
            "kv_norm.weight": (512,),
            "sinks": (64,),
            "o_a_proj.weight": (8 * 1024, 64 * 512 // 8),
            "o_b_proj.weight": (hidden, 8 * 1024),
        }


def test_v41_differs_by_the_head_norm_alone():
    v4 = attention(config("deepseek_v4"))
    v41 = attention(config("deepseek_v41", rms_norm_eps=1e-6))
    v41.load_state_dict(v4.state_dict())
    given = edge_blocks()
    with torch.no_grad():
        assert (run(v4, given) - run(v41, given)).abs().max() > 1e-3
        v41.q_head_norm = True
        assert torch.equal(run(v4, given), run(v41, given))


def test_sinks_stay_wide_and_everything_is_reset():
    made = attention(config("deepseek_v4")).float()
    sinks = made.sinks.detach().clone()
    held = made.sinks
    made.to(torch.bfloat16)
    assert made.sinks is held and made.sinks.dtype == torch.float32 and torch.equal(made.sinks, sinks)
    assert made.q_a_proj.weight.dtype == torch.bfloat16
    given = edge_blocks()
    output = run(made, replace(given, hidden=given.hidden.bfloat16(), context=given.context.bfloat16()))
    assert output.dtype == torch.bfloat16
    expected = run(attention(config("deepseek_v4")), given)
    torch.testing.assert_close(output.double(), expected, rtol=0.1, atol=0.1)
    for mode in KINDS:
        with torch.device("meta"):
            empty = build_attention(config(mode), 0)
        empty.to_empty(device="cpu")
        for parameter in empty.parameters():
            parameter.data.fill_(float("nan"))
        empty.reset_parameters(0.02)
        assert all(parameter.isfinite().all() for parameter in empty.parameters())


def reference_varlen(q, k, v, query_ends, key_ends, max_q, max_k, *, scale, window_size, enable_gqa):
    """What varlen_attn says it does: rows and keys of a sequence end together; a window counts from there."""
    left, right = window_size
    repeat = q.shape[1] // k.shape[1]
    assert enable_gqa == (repeat > 1)
    rows = []
    for sequence in range(len(query_ends) - 1):
        q_first, q_last = query_ends[sequence : sequence + 2].tolist()
        k_first, k_last = key_ends[sequence : sequence + 2].tolist()
        assert q_last - q_first <= max_q and k_last - k_first <= max_k
        for row in range(q_first, q_last):
            place = row - q_last + k_last
            seen = [
                (left < 0 or key >= place - left) and (right < 0 or key <= place + right)
                for key in range(k_first, k_last)
            ]
            heads = [
                attend_row(q[row, h], k[k_first:k_last, h // repeat], v[k_first:k_last, h // repeat], seen, scale, None)
                for h in range(q.shape[1])
            ]
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("layer", LAYERS)
def test_flash_packs_what_the_mask_shows(layer):
    made = attention(config("gqa", attention_backend="eager", **LAYERS[layer]))
    given = edge_blocks()
    with torch.no_grad():
        q = made.queries(given.hidden, attention_context([made], *given.places()).query_position_BQ)
        keys = [torch.randn(2, 2, 9 + 15, 8, dtype=torch.float64) for _ in range(2)]
        expected = eager(q, *keys, make_plan(made.rule, "eager", *given.places()), None, 0.3)
        found = by_sequences(q, *keys, make_plan(made.rule, "flash", *given.places()), 0.3, reference_varlen)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    names = list(inspect.signature(varlen_attn).parameters)
    assert names[3:7] == ["cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size", "enable_gqa"} <= set(names)


def test_backend_by_device():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert choose_backend("auto", True, MaskRule(context_window=4), cpu) == "native"
    assert choose_backend("auto", True, MaskRule(), cpu) == "eager"
    assert choose_backend("auto", False, MaskRule(context_window=4), cpu) == "eager"
    assert choose_backend("auto", True, MaskRule(context_window=4), cuda) == "flex"
    assert choose_backend("sdpa", False, MaskRule(), cuda) == "sdpa"
    v4 = attention(config("deepseek_v4"))
    assert v4.need(cpu) == (MaskRule(context_window=WINDOW), "native")


@pytest.mark.parametrize(
    "mode,changes,words",
    [
        ("deepseek_v4", {"attention_backend": "sdpa"}, "'sdpa'.*'sinks'"),
        ("deepseek_v4", {"attention_backend": "flash"}, "'flash'.*'sinks'"),
        ("gqa", {"attention_backend": "sdpa", "attention_sinks": True}, "'sdpa'.*'sinks'"),
        ("gqa", {"attention_backend": "native", "context_window": None}, "'native'.*context_window"),
        ("deepseek_v4", {"attention_backend": "native", "context_window": None}, "'native'.*context_window"),
        ("gqa", {"attention_backend": "triton"}, "'triton'"),
        ("deepseek_v4", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("deepseek_v4", {"qk_rope_head_dim": 8}, "qk_rope_head_dim is 8"),
        ("deepseek_v4", {"qk_rope_head_dim": 3}, "qk_rope_head_dim is 3"),
        ("deepseek_v4", {"o_groups": 3}, "o_groups is 3"),
        ("deepseek_v4", {"q_lora_rank": None, "o_groups": None}, "needs q_lora_rank, o_groups"),
        ("deepseek_v41", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v41", {"attention_sinks": True}, "attention_sinks"),
        ("mha", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("mla", {"qk_nope_head_dim": 3}, "qk_nope_head_dim 3"),
        ("mla", {"kv_lora_rank": None}, "needs kv_lora_rank"),
        ("gqa", {"head_dim": 7}, "head_dim is 7"),
        ("gqa", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ("gqa", {"context_window": 0}, "context_window is 0"),
        ("gqa", {"sliding_window": 4}, "sliding_window is 4"),
        ("gqa", {"layer_types": ("sliding_attention",)}, "sliding_window is None"),
        ("gqa", {"layer_types": ("linear_attention",)}, "linear_attention"),
    ],
)
def test_what_cannot_be_is_refused_by_name(mode, changes, words):
    with pytest.raises(ValueError, match=words):
        build_attention(config(mode, **changes), 0)


def test_unknown_kind_and_missing_mask_are_named():
    with pytest.raises(ValueError, match="attention_mode is 'mqa'"):
        build_attention(replace(config("gqa"), attention_mode="mqa"), 0)
    made, given = attention(config("gqa")), edge_blocks()
    with pytest.raises(ValueError, match="no mask"):
        made(given.hidden, given.context, attention_context([], *given.places()))


def test_flash_and_flex_name_themselves_on_a_cpu():
    given = edge_blocks()
    with pytest.raises(ValueError, match=r"'flash'.*no flash kernel on cpu.*float64"):
        run(attention(config("gqa", attention_backend="flash")), given)
    with pytest.raises(NotImplementedError, match="'flex' has no backward on a CPU"):
        run(attention(config("gqa", attention_backend="flex")), given)
    made = attention(config("deepseek_v4", attention_backend="flex")).requires_grad_(False)
    made.sinks.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"'flex'.*'sinks'"):
        run(made, given)
    sliding = config("gqa", attention_backend="flash", sliding_window=2, layer_types=("sliding_attention",))
    with pytest.raises(ValueError, match="sliding_window 2 is below block_size 3"):
        run(attention(sliding), given)
