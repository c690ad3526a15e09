"""Reads the files of each rank, for frameworks whose checkpoints consist of such files."""
