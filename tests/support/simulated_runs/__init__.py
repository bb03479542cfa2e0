"""Runs of the simulation: drawn by seed, with faults, checked against invariants, replayed."""
