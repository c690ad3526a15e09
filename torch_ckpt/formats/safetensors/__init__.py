"""Safetensors: the files that are read, and the layout of those that are written."""
