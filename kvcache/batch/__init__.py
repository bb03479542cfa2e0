"""The KV and states of all requests that decode together, as the model sees them."""
