"""Loads a model onto its device, and checks in which form its batch gives right answers."""
