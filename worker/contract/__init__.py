"""What the loop, the scheduler and the engines agree on: the engine protocol, peers, failures."""
