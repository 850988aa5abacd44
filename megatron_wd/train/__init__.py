"""Training: the loop, evaluation, checkpoints, metrics."""
