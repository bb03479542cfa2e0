"""The controller process: HTTP, text, the control plane, and worker processes."""
