"""Checkpoints of DeepSpeed: ZeRO partitions, model-parallel ranks, experts, universal folders."""
