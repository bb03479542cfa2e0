"""Numbered slots for requests and auxiliary states, each with one owner at a time."""
