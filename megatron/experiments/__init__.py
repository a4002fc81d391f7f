"""Benchmarks and comparisons of optimizers."""
