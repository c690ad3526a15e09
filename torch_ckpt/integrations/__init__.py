"""Integrations with other training loops: one module for each."""
