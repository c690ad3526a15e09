"""One module for each format that a checkpoint may have: from its files to an index over them."""
