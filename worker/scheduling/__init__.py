"""Decides what the next step runs, within slots, memory and a pace. No sockets, arrays or clock."""
