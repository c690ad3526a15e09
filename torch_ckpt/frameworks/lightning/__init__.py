"""Lightning: a `CheckpointIO` for its `Trainer`."""
