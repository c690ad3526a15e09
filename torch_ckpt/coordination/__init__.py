"""Ranks agree on the steps of a save or load, within a deadline."""
