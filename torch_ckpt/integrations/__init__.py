"""What other training loops need to save through this package: one module for each."""
