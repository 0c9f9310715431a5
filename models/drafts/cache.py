"""Keys and values of context rows that came in earlier calls."""

import torch


class ContextCache:
    """Per layer the tensors of all context rows so far, positions ascending.

    Rows of a block never enter: their tokens are guesses, and the context brings the target's view of those accepted.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}

    def append(self, layer_idx: int, *fresh: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All rows of each tensor [B, G, S, D] after the fresh ones [B, G, C, D]; keeps them."""
        held = self._layers.get(layer_idx)
        if held is not None:
            fresh = tuple(torch.cat(pair, dim=2) for pair in zip(held, fresh, strict=True))
        self._layers[layer_idx] = fresh
        return fresh

    def length(self, layer_idx: int = 0) -> int:
        """Rows that the layer holds."""
        held = self._layers.get(layer_idx)
        return 0 if held is None else held[0].shape[2]

    def crop(self, length: int) -> None:
        """Keeps the first `length` rows of every layer. Mutates the cache, not the tensors it gave out."""
        if length < 0:
            raise ValueError(f"length {length} of a cropped context cache must be 0 or more")
        self._layers = {i: tuple(part[:, :, :length] for part in held) for i, held in self._layers.items()}
