"""Pure step mathematics on batches of blocks `(..., m, n)`: no state, no process groups, no parameter names."""
