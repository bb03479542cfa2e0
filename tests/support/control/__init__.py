"""The control plane without processes: virtual time, and fake workers."""
