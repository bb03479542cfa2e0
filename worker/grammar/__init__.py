"""Grammars compiled for a model, and the token masks that enforce them."""
