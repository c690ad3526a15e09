"""A module for each format of files: where the bytes of tensors lie in them."""
