"""What a resumed training must agree with that no parameter shows. training.md 4.5."""

from collections.abc import Mapping

from .attention import AttentionConfig

Contract = dict[str, object]
"""Names and plain values: numbers, strings, booleans, null, lists of them."""


def attention_contract(config: AttentionConfig) -> Contract:
    """The attention's part. What a draft may leave out is recorded only when set, so that runs saved before the
    library knew of it compare equal."""
    contract: Contract = {"attention_backend": config.attention_backend, "attention_mode": config.attention_mode}
    if config.is_causal:
        contract["is_causal"] = True
    if config.context_window is not None:
        contract["context_window"] = config.context_window
    if config.sliding_window is not None:
        contract["sliding_window"] = config.sliding_window
        contract["layer_types"] = list(config.layer_types or ())
    return contract


def check_contract(saved: Mapping[str, object], now: Mapping[str, object]) -> None:
    """ValueError with every key that differs, and both values. Tuples and lists of the same items are equal."""
    names = sorted(saved.keys() | now.keys())
    differing = [name for name in names if _plain(saved, name) != _plain(now, name)]
    if differing:
        told = "; ".join(f"{name}: {_shown(saved, name)} when saved, {_shown(now, name)} now" for name in differing)
        raise ValueError(f"this training cannot go on from that state: {told}")


def _plain(contract: Mapping[str, object], name: str) -> tuple[bool, object]:
    value = contract.get(name)
    return name in contract, list(value) if isinstance(value, tuple) else value


def _shown(contract: Mapping[str, object], name: str) -> str:
    return repr(contract[name]) if name in contract else "not set"
