"""How messages travel: the codec, the sockets of both ends, and encryption between machines."""
