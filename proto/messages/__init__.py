"""The values that controller, workers and hosts send each other, bounded where they are declared.

``protocol.py`` joins commands and events into the two directions of the wire.
"""
