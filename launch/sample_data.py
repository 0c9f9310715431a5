"""What the bundled sample is made of: the standard library's source, a byte-level BPE, and a small V4 shape."""

import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ..models.v4.config import V4Config, YarnScaling, flash

VOCABULARY = 1024
LEADING_TOKENS = (
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<\uff5c\u2581pad\u2581\uff5c>",
)
TRAILING_TOKENS = (
    "<\uff5cplace\u2581holder\u2581no\u25810\uff5c>",
    "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>",
    "<think>",
    "</think>",
)
"""Ids at the end of the vocabulary; the first is kept as noise token for a drafter."""

LEFT_OUT = ("test", "tests", "site-packages", "idle_test", "lib2to3", "ensurepip", "__pycache__", "turtledemo")
HELD_OUT_SHARE = 25
"""One file in so many, by a hash of its name, is kept for validation."""

# Indentation goes with its newline, words with the blank before them, so that Python needs few tokens.
SPLIT = r"\r?\n[ \t]*| ?[A-Za-z_]+| ?[0-9]| ?[^\sA-Za-z_0-9]+|[ \t]+"


def source_files(wanted: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, str]]:
    """(relative path, text) of the standard library's modules, sorted; tests and third-party parts left out. wanted:
    which of the paths are read."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not set(parts) & set(LEFT_OUT) and wanted("/".join(parts)):
            try:
                yield "/".join(parts), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def is_held_out(name: str) -> bool:
    """Whether a file is kept for validation: decided by its name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_SHARE == 0


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A lossless byte-level BPE of VOCABULARY ids, special tokens in the official places."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TRAILING_TOKENS),
        special_tokens=list(LEADING_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TRAILING_TOKENS])
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str], config: V4Config) -> torch.Tensor:
    """All texts as one stream of ids, each between its begin and end token."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        ids += [config.bos_token_id, *encoding.ids, config.eos_token_id]
    return torch.tensor(ids, dtype=torch.int64)


def sample_config() -> V4Config:
    """The sample's shape: every layer kind, ten layers, 16 experts, and a top-k that binds early."""
    return replace(
        flash(),
        hidden_size=160,
        num_hidden_layers=10,
        vocab_size=VOCABULARY,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=96,
        o_groups=4,
        o_lora_rank=64,
        sliding_window=64,
        compress_ratios=(0, 0, 4, 128, 4, 128, 4, 128, 4, 0),
        draft_ratios=(),
        index_n_heads=24,
        index_head_dim=32,
        index_topk=32,
        moe_intermediate_size=64,
        n_routed_experts=16,
        num_experts_per_tok=2,
        num_hash_layers=2,
        hc_sinkhorn_iters=8,
        max_position_embeddings=65536,
        yarn=YarnScaling(factor=16.0, original_max_position_embeddings=4096),
    )
