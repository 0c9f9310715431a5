"""Compiled forms of what small steps do most, for FP32 inference on the CPU; the bits are those of the plain forms."""
