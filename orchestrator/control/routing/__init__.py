"""Routing: the table of ready owners, the router, and its policies."""
