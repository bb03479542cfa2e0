"""The controller and its workers in virtual time, over a wire with any fault, by a seed."""
