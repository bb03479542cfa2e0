"""Capacity arithmetic: topology, owners' shares, token pools and request limits."""
