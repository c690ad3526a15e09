"""Megatron-Core: strategies of `dist_checkpointing`, its queues, and its old flattened files."""
