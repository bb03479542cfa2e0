"""Fixtures for every folder of tests."""

pytest_plugins = ["model_fixtures"]
