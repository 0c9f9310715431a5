"""Training of a drafter: anchors, blocks, the objective, its metrics, and the step of the trainer."""
