"""Steps of a training run: saved, restored and retained."""
