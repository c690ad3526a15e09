"""The command ``torch-ckpt``: a module for each subcommand."""
