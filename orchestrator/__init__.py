"""The controller process: HTTP, text, queue, ledger, routing and supervision of workers."""
