"""Versions of a model's weights for inference: whole ones, and differences between them."""
