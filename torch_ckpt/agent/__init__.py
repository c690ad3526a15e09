"""The process that keeps snapshots in shared memory, and brings them to disk."""
