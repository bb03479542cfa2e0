"""What the control plane holds: requests with their queue and deadlines, grants, running totals."""
