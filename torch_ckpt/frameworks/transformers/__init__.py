"""transformers of Hugging Face: the callback of its `Trainer`, and how its models are loaded."""
