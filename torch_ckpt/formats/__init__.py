"""A module or a directory per file format: each locates the bytes of tensors in the files."""
