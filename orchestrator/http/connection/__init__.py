"""Client connections: the embedded server, deadlines, sockets, disconnects."""
