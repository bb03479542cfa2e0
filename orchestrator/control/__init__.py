"""The control plane: requests, routing and supervision of workers. Pure but for two edges.

Time and events come in as arguments. Only ``controller`` and ``workers/fleet`` do I/O.
"""
