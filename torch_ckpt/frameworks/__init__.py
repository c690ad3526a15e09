"""A directory for each framework: its files as a source, its saves, its rules, its switch."""
