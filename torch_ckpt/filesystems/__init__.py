"""Access to the files of checkpoints and runs, by path or URL."""
