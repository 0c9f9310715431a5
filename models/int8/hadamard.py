"""The orthonormal Hadamard rotation: it spreads a row's outliers over all its codes."""

from functools import lru_cache

import torch


@lru_cache
@torch.inference_mode(False)
def hadamard_matrix(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Sylvester's matrix times size^-0.5, [size, size], symmetric and its own inverse. Shared: nobody mutates it.

    ValueError where size is no power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"the size of a Hadamard rotation is {size}; allowed are powers of two")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return (matrix * size**-0.5).to(dtype).to(device)
