"""Planners, and the tables of items that the engine plans with."""
