"""Runs of the simulation: drawn by seed, harmed, held to invariants, replayed."""
