"""The values that controller, workers and hosts send each other, with bounds in their declarations.

``protocol.py`` lists commands and events: the two directions between controller and worker.
"""
