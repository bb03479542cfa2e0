"""Fixtures that more than one folder uses."""

pytest_plugins = ["tests.model_fixtures"]
