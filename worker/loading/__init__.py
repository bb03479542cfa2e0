"""Loads a model, and checks which form of batch gives correct results."""
