"""The steps of a run: where they are whole, which one a restore chooses, and their removal."""
