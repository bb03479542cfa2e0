"""The control plane: queue, ledger, routing, dispatch and supervision, all by given time."""
