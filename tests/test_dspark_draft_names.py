"""A draft that is built from a conversion's config has the conversion's names and shapes, and takes its tensors."""

from pathlib import Path

import pytest
import torch
from official_drafters import VARIANT_NAMES, write_official
from test_dspark_layout import COUNTS, PUBLISHED, published

from meshspark.models.conversion.configs import draft_json
from meshspark.models.conversion.loading import load_dspark
from meshspark.models.conversion.names import draft_tensors
from meshspark.models.conversion.variants import VARIANTS

drafts = pytest.importorskip("meshspark.models.drafts.draft")
configs = pytest.importorskip("meshspark.models.drafts.config")


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_published_drafts_have_our_names_and_shapes(variant: str) -> None:
    shape, table = published(variant)
    config = configs.DraftConfig.from_dict(draft_json(VARIANTS[variant], shape, PUBLISHED[variant], "bfloat16"))
    with torch.device("meta"):
        draft = drafts.DSparkDraft(config)
    found = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    assert found == {tensor.name: tensor.shape for tensor in draft_tensors(table)}
    assert sum(tensor.numel() for tensor in draft.state_dict().values()) == COUNTS[variant][2]


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_a_draft_takes_the_tensors_that_were_read(tmp_path: Path, variant: str) -> None:
    """In the dtypes that it keeps them in, so that nothing is rounded."""
    loaded = load_dspark(write_official(tmp_path / "in", variant))
    draft = drafts.DSparkDraft(configs.DraftConfig.from_dict(loaded.config))
    result = draft.load_state_dict(dict(loaded.tensors), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor.double(), loaded.tensors[name].double()), name
