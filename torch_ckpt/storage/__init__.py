"""The DCP plugin: storage writers, storage readers, and the files that they write and read."""
