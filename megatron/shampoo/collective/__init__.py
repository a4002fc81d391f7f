"""Carries out a plan: moves fragments of blocks between the ranks of one data-parallel group. No matrix maths."""
