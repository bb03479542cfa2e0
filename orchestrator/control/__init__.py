"""The control plane: requests, routing and supervision of workers.

Time and events come in as arguments, so it is pure: only ``controller`` and ``workers/fleet`` do
I/O. ``core`` wires the parts together, and its docstring has a picture of that.
``state/request_table`` has every transition of a request, ``workers/supervisor`` every transition
of a worker.

One word each: an ``owner`` is the object in the rank table, ``dp_rank`` its number. The worker of
that number exists whether it is an owner at present or not; its number is ``index``.
"""
