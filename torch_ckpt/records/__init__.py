"""The record of the phases of saves and loads of a run, and reports about it."""
