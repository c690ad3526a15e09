"""Transactions: files that appear in a directory together, or not at all."""
