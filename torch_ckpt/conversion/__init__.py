"""Writes a checkpoint of one format as a checkpoint of another, in bounded memory."""
