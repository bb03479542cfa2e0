"""What fits: topology, the owners' shares, token pools and the limits of requests."""
