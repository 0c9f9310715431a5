"""The V4 target as one row-based forward."""
