"""The HTTP application without a controller, and calls to it."""
