"""The values that controller, workers and hosts send each other, with bounds in their declarations.

The controller sends ``commands`` down to a worker, and the worker sends ``events`` up; the unions
at the ends of these modules list them. The codec enforces every bound on arrival.

``epoch`` counts the grants of one request: an event whose epoch is not the request's present one is
stale and dropped. The sender's incarnation is its socket identity, so it is on every frame.
"""
