"""The self-check tries the drafter's products where the config has a drafter, and tells which of them fails."""

from collections.abc import Callable

import pytest
import torch
from draft_scene import draft_config

from meshspark.models import selfcheck
from meshspark.models.numerics import FLOAT32, W8A8
from meshspark.models.v4.config import flash, flash_dspark, tiny

BLOCKS = ["block scores 21 lanes", "block values 21 lanes", "confidence of 72 inputs"]


def names(config, mode) -> set[str]:
    def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    linears = {f"linear {mode.name} {i} -> {o}" for _, i, o in selfcheck._linears(config, mode)}
    return linears | {name for name, _ in selfcheck._block_products(config, noise)}


def test_what_a_drafter_adds() -> None:
    new = names(draft_config(), FLOAT32) - names(tiny(), FLOAT32)
    assert new == {"linear float32 192 -> 64", "linear float32 8 -> 264", *BLOCKS}
    wide = selfcheck._linears(flash_dspark(), FLOAT32) - selfcheck._linears(flash(), FLOAT32)
    assert wide == {(torch.float32, 12288, 4096), (torch.float32, 256, 4096)}


def test_packed_forms_of_a_drafter_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def note(product: selfcheck.Product) -> bool:
        tried.append(str(getattr(product[0], "__self__", None).__class__.__name__) + str(tuple(product[1].shape)))
        return True

    monkeypatch.setattr(selfcheck, "_independent", note)
    selfcheck.row_independence(draft_config(), (W8A8,))
    assert {f"DenseWeight({selfcheck.LARGE_ROWS}, {inputs})" for inputs in (192, 8)} <= set(tried)


@pytest.mark.parametrize("planted", ["tile_product", "row_linear"])
def test_a_product_that_depends_on_company_is_named(monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    sound: Callable[..., torch.Tensor] = getattr(selfcheck, planted)

    def company(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return sound(x, weight) * (1 + 1e-6 * len(x))

    monkeypatch.setattr(selfcheck, planted, company)
    found = selfcheck.row_independence(draft_config(), (FLOAT32,))
    wanted = BLOCKS[:2] if planted == "tile_product" else ["linear torch.float32 192 -> 64"]
    assert not found["holds"] and set(wanted) <= set(found["details"])
