"""The native modules, their type stubs, and the functions that pass tensors to them."""
