"""Numbers in [0, 1) by counter: each is named by a request's seed, a token's position and a stream, by nothing else.

Philox 4x64-10, the generator that numpy has under this name, for many names at once. Letters: N names.
"""

import numpy as np

TARGET, TEST, DRAFT = 0, 1, 2
"""Streams: what a token is drawn with where the target decides, what a draft is judged with, and, counting on by a
draft's number in its block, what it is drawn with. A position is drafted anew in every step until it has its token;
with a stream for each number no two of these draws are the same, whatever a scheduler makes of earlier ones."""

_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


def uniforms(seed_N: np.ndarray, position_N: np.ndarray, stream_N: np.ndarray | int = TARGET) -> np.ndarray:
    """FP64 of the arguments' common shape. Seeds are taken modulo 2^64; stream TARGET is what `uniform` gives."""
    shape = np.broadcast_shapes(np.shape(seed_N), np.shape(position_N), np.shape(stream_N))
    keys = [np.broadcast_to(np.asarray(key).astype(np.uint64), shape) for key in (seed_N, position_N)]
    stream_N = np.broadcast_to(np.asarray(stream_N).astype(np.uint64), shape)
    words = [np.ones(shape, np.uint64), np.zeros(shape, np.uint64), np.zeros(shape, np.uint64), stream_N]
    with np.errstate(over="ignore"):
        for number in range(_ROUNDS):
            step = [key + np.uint64(number * weyl % (1 << 64)) for key, weyl in zip(keys, _WEYL, strict=True)]
            high_0, low_0 = _product(words[0], _MULTIPLIERS[0])
            high_1, low_1 = _product(words[2], _MULTIPLIERS[1])
            words = [high_1 ^ words[1] ^ step[0], low_1, high_0 ^ words[3] ^ step[1], low_0]
    return (words[0] >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _product(words_N: np.ndarray, factor: int) -> tuple[np.ndarray, np.ndarray]:
    """Both halves of the product in 128 bits: high, low."""
    a, b = words_N >> _HALF, words_N & _LOW
    c, d = np.uint64(factor >> 32), np.uint64(factor & 0xFFFFFFFF)
    middle = (b * d >> _HALF) + (a * d & _LOW) + (b * c & _LOW)
    return a * c + (a * d >> _HALF) + (b * c >> _HALF) + (middle >> _HALF), words_N * np.uint64(factor)
