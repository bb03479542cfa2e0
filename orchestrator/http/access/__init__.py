"""Access control by path, host and origin. Pure."""
