"""The one door to files: where a checkpoint lies, by path or URL."""
