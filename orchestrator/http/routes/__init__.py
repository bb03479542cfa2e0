"""The routes, and the context that they share."""
