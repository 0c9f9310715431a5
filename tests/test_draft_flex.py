"""Flex and flash attention: options of their kernels, the compiler's path, and what only a CUDA device can show."""

import pytest
import torch
from draft_attention_scene import attention, blocks, config, edge_blocks, on, run
from torch.nn.attention.flex_attention import FlexKernelOptions

from meshspark.models.drafts.attention import AttentionConfig, attention_context
from meshspark.models.drafts.flex import clones_values, flex_options
from meshspark.models.drafts.kinds import build_attention

BACKWARD = {
    "bwd_BLOCK_M1": 32,
    "bwd_BLOCK_N1": 32,
    "bwd_BLOCK_M2": 32,
    "bwd_BLOCK_N2": 32,
    "bwd_num_warps": 8,
    "bwd_num_stages": 3,
}
FORWARD = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32}

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    "head_dim,capability,expected",
    [
        (512, (9, 0), BACKWARD),
        (512, (10, 0), BACKWARD | FORWARD),
        (257, (10, 3), BACKWARD | FORWARD),
        (512, (12, 0), BACKWARD | FORWARD),
        (512, (8, 9), {}),
        (256, (9, 0), {}),
        (64, (10, 0), {}),
        (512, None, {}),
    ],
)
def test_tiles_by_width_and_device(head_dim, capability, expected):
    assert flex_options(head_dim, capability) == expected
    assert clones_values(head_dim, capability) == bool(expected)


def test_given_options_win():
    assert flex_options(512, (9, 0), {"bwd_BLOCK_M1": 64}) == BACKWARD | {"bwd_BLOCK_M1": 64}
    unprefixed = flex_options(512, (10, 0), {"BLOCK_M": 64, "num_warps": 4})
    assert unprefixed == {
        name: value for name, value in (BACKWARD | FORWARD).items() if name not in ("bwd_num_warps", "fwd_BLOCK_M")
    } | {"BLOCK_M": 64, "num_warps": 4}
    given = {"BLOCK_N": 16}
    assert flex_options(64, (8, 0), given) == given
    assert flex_options(64, None, given) is not given


@pytest.mark.parametrize("name,value", [("BLOCK_M", 48), ("bwd_BLOCK_N2", 256), ("fwd_BLOCK_N", 0), ("BLOCK_M1", True)])
def test_tiles_divide_those_of_the_mask(name, value):
    with pytest.raises(ValueError, match=f"flex_options {name} is {value}"):
        flex_options(64, None, {name: value})


def test_names_are_those_that_flex_knows():
    known = FlexKernelOptions.__annotations__
    assert all(name[4:] in known for name in BACKWARD | FORWARD)


def test_flex_as_it_is_called_on_a_cpu():
    torch._dynamo.reset()
    made = attention(config("deepseek_v4", attention_backend="flex")).requires_grad_(False)
    given = edge_blocks()
    torch.testing.assert_close(run(made, given), run(on(made, "eager"), given), rtol=1e-12, atol=1e-13)


def wide_config(**changes) -> AttentionConfig:
    """Heads of V4-Flash's width, few of them."""
    settings = {
        "num_attention_heads": 8,
        "head_dim": 512,
        "hidden_size": 256,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 64,
    }
    return config("deepseek_v4", **(settings | {"o_lora_rank": 32, "context_window": 128} | changes))


def on_cuda(settings, dtype=torch.float32):
    made = attention(settings)
    given = blocks([[0, 1, 127, 128, 129, 300], [5, 250, 90, 0, 7, 299]], [[1] * 6, [1, 1, 1, 0, 1, 1]], 300, 5, 256)
    moved = type(given)(
        given.anchors.cuda(),
        given.keep.cuda(),
        given.positions.cuda(),
        given.size,
        given.hidden.to("cuda", dtype).requires_grad_(),
        given.context.to("cuda", dtype).requires_grad_(),
    )
    cuda = build_attention(settings, 0).to("cuda", dtype)
    cuda.load_state_dict(made.state_dict())
    return cuda, moved


def gradients(made, given):
    output = run(made, given)
    probe = torch.linspace(-1, 1, output.numel(), device="cuda").view(output.shape).sin()
    inputs = dict(made.named_parameters()) | {"hidden": given.hidden, "context": given.context}
    found = torch.autograd.grad((output.float() * probe).sum(), list(inputs.values()))
    return output, dict(zip(inputs, found, strict=True))


def compare(made, plain, given, share):
    """Outputs and all gradients differ by at most that share of their length."""
    output, found = gradients(made, given)
    expected_output, expected = gradients(plain, given)
    for name in expected | {"output": None}:
        want, have = (expected_output, output) if name == "output" else (expected[name], found[name])
        assert want.float().norm() > 0, name
        assert (have.float() - want.float()).norm() <= share * want.float().norm(), name


@needs_cuda
@pytest.mark.parametrize("mode,head_dim", [("deepseek_v4", 512), ("deepseek_v4", 128), ("gqa", 64)])
def test_flex_gradients_on_cuda(mode, head_dim):
    """Sinks, tiles of wide heads and the copy of aliased values included: all gradients against eager."""
    extra = {"attention_sinks": True, "num_key_value_heads": 2} if mode == "gqa" else {}
    settings = wide_config(attention_mode=mode, head_dim=head_dim, attention_backend="flex", **extra)
    made, given = on_cuda(settings)
    plain = build_attention(wide_config(attention_mode=mode, head_dim=head_dim, attention_backend="eager", **extra), 0)
    plain.cuda().load_state_dict(made.state_dict())
    compare(made, plain, given, 2e-3)


@needs_cuda
def test_sinks_alone_learn_hidden_values_on_cuda():
    teacher, given = on_cuda(wide_config(head_dim=128, attention_backend="flex"))
    wanted = run(teacher.requires_grad_(False), given).detach()
    student, _ = on_cuda(wide_config(head_dim=128, attention_backend="flex"))
    student.requires_grad_(False)
    student.sinks.zero_()
    student.sinks.requires_grad_()
    optimizer = torch.optim.Adam([student.sinks], lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        (run(student, given) - wanted).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(student.sinks.detach(), teacher.sinks, rtol=0, atol=0.02)


@needs_cuda
@pytest.mark.parametrize("backend", ["eager", "native", "flex"])
def test_a_step_does_not_wait_for_the_device(backend):
    made, given = on_cuda(wide_config(attention_backend=backend))

    def step():
        context = attention_context([made], *given.places())
        made(given.hidden, given.context, context).float().square().sum().backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
@pytest.mark.parametrize("layer", ["window", "causal", "sliding"])
def test_flash_on_cuda(layer):
    changes = {
        "window": {"context_window": 128},
        "causal": {"context_window": None, "is_causal": True},
        "sliding": {"context_window": None, "sliding_window": 9, "layer_types": ("sliding_attention",)},
    }[layer]
    settings = wide_config(
        attention_mode="gqa", head_dim=64, num_key_value_heads=2, attention_backend="flash", **changes
    )
    made, given = on_cuda(settings, torch.bfloat16)
    plain = on(made, "eager").to("cuda", torch.bfloat16)
    compare(made, plain, given, 3e-2)
