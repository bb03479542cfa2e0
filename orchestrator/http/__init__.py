"""The HTTP server: middleware, routes and responses, for any API format."""
