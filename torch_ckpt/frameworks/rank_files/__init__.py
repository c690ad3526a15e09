"""Files that each rank wrote, of which a framework's modules make the tensors of a checkpoint."""
