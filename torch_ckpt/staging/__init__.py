"""Copies of a state dict's tensors in reusable memory."""
