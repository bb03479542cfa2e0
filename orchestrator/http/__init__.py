"""The endpoint: routes, streams, refusals and metrics."""
