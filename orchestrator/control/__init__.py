"""The control plane: requests, routing and supervision of workers.

Time and events come in as arguments, so it is pure: only ``controller`` and ``workers/fleet`` do
I/O. ``core`` wires the parts together. ``state/request_table`` has every transition of a request,
``workers/supervisor`` every transition of a worker.
"""
