"""State of the control plane: requests, ready owners with their grants and heartbeats, totals."""
