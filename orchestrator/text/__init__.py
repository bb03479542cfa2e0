"""The text side of a model: templates, tokens and stop strings."""
