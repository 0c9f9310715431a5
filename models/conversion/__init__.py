"""The official mtp.* of a DSpark drafter to a draft's tensors and back."""
