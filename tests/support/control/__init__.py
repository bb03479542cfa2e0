"""The control plane without processes: virtual time, and workers to drive it."""
