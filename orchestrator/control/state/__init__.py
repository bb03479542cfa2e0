"""State of the control plane: requests with their queue and deadlines, grants, running totals."""
