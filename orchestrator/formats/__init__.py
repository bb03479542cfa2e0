"""API formats: one folder each, and the table that registers them."""
