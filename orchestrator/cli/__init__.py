"""The command line: what each command does, from flags to an exit status."""
