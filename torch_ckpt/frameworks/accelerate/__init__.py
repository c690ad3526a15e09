"""accelerate: the sharded state dicts that each rank saved with `torch.save`."""
