"""Which owner gets a request: what each owner holds, and the policies."""
