"""Interfaces between loop, scheduler and engines: the engine protocol, peers, failures."""
