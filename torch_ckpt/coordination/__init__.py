"""Coordination of the ranks of a save or load, within a deadline."""
