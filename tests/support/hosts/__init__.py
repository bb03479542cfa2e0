"""Real services, on this machine and on imitated hosts."""
