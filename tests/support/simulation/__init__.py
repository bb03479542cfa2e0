"""The controller and its workers in virtual time, over a wire that may do anything, by a seed."""
