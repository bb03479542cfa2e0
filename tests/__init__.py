"""Tests, in the folders of the product that they test, and their shared code, in ``support``."""
