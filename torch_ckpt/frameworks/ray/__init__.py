"""Ray Train: a run whose steps are its checkpoints."""
