"""Pure batched matrix functions: tensors in, tensors out, no state, no process groups."""
