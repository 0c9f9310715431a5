"""The network, its weights and the step: one rank's share, with the rest asked from comm."""
