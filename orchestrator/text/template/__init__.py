"""Runs chat templates: jinja2 as transformers sets it up, with bounds on what they take."""
