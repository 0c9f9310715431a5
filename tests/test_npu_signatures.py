"""Our calls of torch-npu's INT8 operators against the operators' signatures: all that can be checked without a device.

tests/npu_signatures.json holds the signatures. From them operators of the same names are made for the CPU, so torch
itself binds our calls; they compute what the operators' documentation says and refuse what it excludes.
`MESHSPARK_NPU_WHEEL=torch_npu-2.13.0-....whl pytest tests/test_npu_signatures.py` compares the file with a wheel.
"""

import ast
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshspark.models.int8 import npu
from meshspark.models.int8.device_forms import NpuMatmul
from meshspark.models.int8.exact import failure, integer_sums

SIGNATURES: dict[str, Any] = json.loads(Path(__file__).with_name("npu_signatures.json").read_text())["operators"]
META = "torch_npu/op_plugin/meta/_meta_registrations.py"
SCHEMAS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"


def schema(name: str) -> str:
    """The operator's signature in torch's own words."""
    signature = SIGNATURES[name]
    arguments = [f"{kind} {argument}" for argument, kind in signature["positional"].items()] + ["*"]
    for argument, kind in signature["keyword"].items():
        type_name, default = kind.split(" = ")
        arguments.append(f"{type_name} {argument}=" + (f'"{default}"' if type_name == "str" else default))
    return f"{name}({', '.join(arguments)}) -> {signature['returns']}"


def quant_matmul(x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor, **rest: Any) -> torch.Tensor:
    """INT32 comes out raw, and only of float scales without a row scale."""
    allow(rest, output_dtype=dtype_number(torch.int32))
    assert x1.dtype == x2.dtype == torch.int8 and x1.shape[1] == x2.shape[0] <= 65535
    assert x1.numel() and x2.numel(), "empty tensors are refused"
    assert scale.dtype == torch.float32 and scale.shape in ((1,), (x2.shape[1],))
    return (x1.long() @ x2.long()).to(torch.int32)


def grouped_matmul(x: list[torch.Tensor], weight: list[torch.Tensor], **rest: Any) -> list[torch.Tensor]:
    group_list = rest.pop("group_list")
    allow(rest, output_dtype=dtype_number(torch.int32), split_item=3, group_type=0, group_list_type=1)
    assert len(x) == len(weight) == 1 and weight[0].ndim == 3 and x[0].dtype == weight[0].dtype == torch.int8
    assert x[0].shape[1] == weight[0].shape[1]
    assert group_list.dtype == torch.int64 and len(group_list) == len(weight[0]) > 1
    assert int(group_list.sum()) == len(x[0]), "counts, not ends"
    rows = x[0].split(group_list.tolist())
    return [torch.cat([part.long() @ w.long() for part, w in zip(rows, weight[0], strict=True)]).to(torch.int32)]


def dynamic_quant(input: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    allow(rest, dst_type=dtype_number(torch.int8), quant_mode="pertoken", dst_type_max=0.0)
    assert input.dtype in (torch.bfloat16, torch.float16) and input.ndim > 1
    scale = input.float().abs().amax(-1) / 127
    return (input.float() / scale.unsqueeze(-1)).round().to(torch.int8), scale


def allow(given: dict[str, Any], **allowed: Any) -> None:
    """Arguments that our calls set; torch leaves out those at their defaults or gives them as they are."""
    default = {"split_item": 0, "group_list_type": 0, "act_type": 0, "quant_mode": "pertoken", "dst_type_max": 0.0}
    for name, value in given.items():
        assert value == allowed.get(name, default.get(name)), f"{name}={value}"
    missing = [name for name in allowed if name not in given and allowed[name] != default.get(name)]
    assert not missing, missing


def dtype_number(dtype: torch.dtype) -> int:
    """The number that a dtype becomes where the signature says int."""
    return {torch.int8: 1, torch.int32: 3}[dtype]


@pytest.fixture
def operators() -> Iterator[None]:
    """torch.ops.npu on the CPU, for one test."""
    if hasattr(torch, "npu"):
        pytest.skip("torch-npu is there: its own operators have these names")
    with torch.library._scoped_library("npu", "FRAGMENT") as library:
        for name, run in (
            ("npu_quant_matmul", quant_matmul),
            ("npu_grouped_matmul", grouped_matmul),
            ("npu_dynamic_quant", dynamic_quant),
        ):
            library.define(schema(name))
            library.impl(name, run, "CompositeExplicitAutograd")
        yield


def random_codes(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int8)


@pytest.mark.usefixtures("operators")
def test_products_bind_and_are_exact() -> None:
    assert failure(NpuMatmul, 2048, True, torch.device("cpu")) == ""
    codes_XOI, rows_RI = random_codes(3, 20, 64), random_codes(9, 64)
    for matrices, counts in ((1, (9,)), (3, (4, 0, 5)), (3, (0, 0, 9))):
        found = NpuMatmul(codes_XOI[:matrices]).sums(rows_RI, counts)
        assert found.dtype == torch.float32
        assert torch.equal(found, integer_sums(rows_RI, codes_XOI[:matrices], counts))
    for matrices in (1, 3):
        assert NpuMatmul(codes_XOI[:matrices]).sums(rows_RI[:0], (0,) * matrices).shape == (0, 20)


@pytest.mark.usefixtures("operators")
def test_row_quantisation_binds() -> None:
    x_TI = torch.randn(4, 32, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    codes_TI, scale_T = npu.dynamic_quant(x_TI)
    assert codes_TI.dtype == torch.int8 and codes_TI.abs().amax(1).tolist() == [127] * 4
    assert scale_T.dtype == torch.float32 and scale_T.shape == (4,)


@pytest.mark.usefixtures("operators")
def test_a_call_that_does_not_fit_is_refused() -> None:
    codes, ones = random_codes(4, 4), torch.ones(4)
    with pytest.raises(RuntimeError, match="out_dtype"):
        torch.ops.npu.npu_quant_matmul(codes, codes, ones, out_dtype=torch.int32)
    with pytest.raises(RuntimeError, match="3 positional"):
        torch.ops.npu.npu_quant_matmul(codes, codes, ones, None)
    with pytest.raises(AssertionError, match="output_dtype"):
        torch.ops.npu.npu_quant_matmul(codes, codes, ones)


def test_without_torch_npu_the_form_says_that_it_is_not_there() -> None:
    if hasattr(torch, "npu"):
        pytest.skip("torch-npu is there")
    reason = failure(NpuMatmul, 64, False, torch.device("cpu"))
    assert not [module for module in sys.modules if module.startswith("torch_npu")]
    assert reason.startswith("is not there") and "npu_quant_matmul" in reason


def test_signatures_are_those_of_the_wheel() -> None:
    wheel = os.environ.get("MESHSPARK_NPU_WHEEL")
    if not wheel:
        pytest.skip("MESHSPARK_NPU_WHEEL names no wheel of torch-npu")
    with zipfile.ZipFile(wheel) as files:
        module = ast.parse(files.read(META))
        declared = files.read(SCHEMAS).decode()
    functions = {node.name.removesuffix("_meta"): node for node in module.body if isinstance(node, ast.FunctionDef)}
    for name, signature in SIGNATURES.items():
        lines = [line.split("func: ")[1] for line in declared.splitlines() if f"func: {name}(" in line]
        assert len(lines) == 1, name
        assert str(torch._C.parse_schema(lines[0])) == str(torch._C.parse_schema(schema(name)))
        arguments = functions[name].args
        # The first argument of one of them has another name in Python, where it is positional.
        assert len(arguments.args) == len(signature["positional"]), name
        assert [each.arg for each in arguments.kwonlyargs] == list(signature["keyword"]), name
