"""Where the steps of a run are whole, which one a restore chooses, and who may take one away."""
