"""Staging: copies of a state dict's tensors in reusable host memory."""
