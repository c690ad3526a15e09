"""What saves and loads did, phase by phase: the record of a run, and reports of it."""
