"""Tests, in the folders of the product that they test, and what they share, in ``support``."""
