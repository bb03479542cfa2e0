"""Shared by tests: models and references, and simulated surroundings of each process."""
