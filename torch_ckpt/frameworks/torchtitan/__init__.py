"""torchtitan: a checkpoint manager that its configuration names."""
