"""The DCP plugin: writers, readers, and the files below them."""
