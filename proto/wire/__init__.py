"""Transport of messages: the codec, the sockets of both ends, encryption between machines."""
