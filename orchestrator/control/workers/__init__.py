"""Supervision of workers: starts, health, losses, restarts."""
