"""What the command ``torch-ckpt`` can do: a module for each of its commands."""
