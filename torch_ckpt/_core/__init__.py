"""The native modules, their stubs, and what Python needs to hand tensors to them."""
