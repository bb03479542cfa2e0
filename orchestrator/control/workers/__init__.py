"""Keeps workers alive: starts, health, losses, restarts."""
