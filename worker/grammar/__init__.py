"""Grammars compiled for a model, and the token masks that hold answers to them."""
