"""The engine without a model, for tests of everything else."""
