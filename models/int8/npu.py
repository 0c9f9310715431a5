"""The calls of torch-npu's INT8 operators. Nothing here is imported or looked up before an NPU tensor comes by.

The operators were never run by this project: tests bind these calls to the operators' signatures.
Letters: T or R rows, I inputs, O outputs, X matrices.
"""

from collections.abc import Sequence

import torch

BY_ROWS = 0
"""group_type: the groups are runs of rows."""
COUNTS = 1
"""group_list_type: the list holds the length of each run."""
ONE_OUTPUT = 3
"""split_item: the runs stay together in one tensor."""


def dynamic_quant(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 [T, I], scale FP32 [T] = a / 127) of rows in BF16 or FP16; no least amplitude."""
    codes_TI, scale_T = torch.ops.npu.npu_dynamic_quant(x_TI, dst_type=torch.int8)
    return codes_TI, scale_T


def quant_matmul(codes_RI: torch.Tensor, codes_IO: torch.Tensor, ones_O: torch.Tensor) -> torch.Tensor:
    """INT32 sums [R, O]; ones_O, in FP32, is the scale that the operator demands."""
    sums: torch.Tensor = torch.ops.npu.npu_quant_matmul(codes_RI, codes_IO, ones_O, output_dtype=torch.int32)
    return sums


def grouped_matmul(codes_RI: torch.Tensor, codes_XIO: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """INT32 sums [R, O] of rows sorted by matrix, counts [X] of them through each."""
    sums: list[torch.Tensor] = torch.ops.npu.npu_grouped_matmul(
        [codes_RI],
        [codes_XIO],
        group_list=torch.tensor(list(counts), dtype=torch.int64, device=codes_RI.device),
        split_item=ONE_OUTPUT,
        group_type=BY_ROWS,
        group_list_type=COUNTS,
        output_dtype=torch.int32,
    )
    return sums[0]
