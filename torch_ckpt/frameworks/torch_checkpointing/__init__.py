"""Directories of meta-pytorch's ``torch_checkpointing``."""
