"""A draft of the kind that a config names."""

from .config import DraftConfig
from .draft import DSparkDraft
from .mtp import MtpDraft

Draft = DSparkDraft | MtpDraft


def build_draft(config: DraftConfig, attention_backend: str = "auto") -> Draft:
    """DSparkDraft or MtpDraft, fresh. ValueError for what a backend cannot serve."""
    return (MtpDraft if config.is_mtp else DSparkDraft)(config, attention_backend)
