"""Drafts that are trained: attention and residual kinds, heads, and the draft made of them."""
