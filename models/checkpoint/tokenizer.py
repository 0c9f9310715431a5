"""A byte-level tokenizer.json for checkpoints without a trained one."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ..v4.config import V4Config

BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
PAD = "<\uff5c\u2581pad\u2581\uff5c>"
CHAT_TOKENS = ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>", "</think>")
NOISE = "<\uff5cdspark\u2581noise\uff5c>"
NUM_BYTES = 256


def byte_level_tokenizer(config: V4Config) -> tuple[str | None, tuple[str, ...]]:
    """(tokenizer.json, notes): one token per byte, special tokens under the official names.

    Beginning and end of text (and the drafter's noise) sit at the config's ids. Padding and the chat tokens
    follow where the vocabulary has room; what has none is named in the notes. None where bytes do not fit.
    """
    fixed = {config.bos_token_id: BOS, config.eos_token_id: EOS}
    if config.dspark is not None:
        fixed[config.dspark.noise_token_id] = NOISE
    room = config.vocab_size - NUM_BYTES - len(fixed)
    if room < 0:
        needed = NUM_BYTES + len(fixed)
        return None, (f"no tokenizer.json: vocab_size is {config.vocab_size}, byte-level needs at least {needed}",)
    optional = (PAD, *CHAT_TOKENS)
    # Padding's official id is the lowest free one; the others follow the bytes as they follow the words there.
    order = [*optional[: min(room, 1)], *sorted(pre_tokenizers.ByteLevel.alphabet()), *optional[1:room]]
    free = iter(i for i in range(config.vocab_size) if i not in fixed)
    vocab = {token: i for i, token in fixed.items()} | dict(zip(order, free, strict=False))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = (*fixed.values(), *optional[:room])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    left_out = optional[max(room, 0) :]
    notes = (f"no room in vocab_size {config.vocab_size} for {', '.join(left_out)}",) if left_out else ()
    return tokenizer.to_str(), notes
