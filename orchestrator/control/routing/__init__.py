"""Routing: the router and its policies."""
