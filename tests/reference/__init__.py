"""Oracles: the published methods written plainly in float64, sharing no code with the package."""
