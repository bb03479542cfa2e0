"""Worker processes and the machine they run on."""
