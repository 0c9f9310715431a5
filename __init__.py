"""DeepSeek-V4-Flash with DSpark speculative decoding, on a mesh of ranks."""

__version__ = "0.1.0"
