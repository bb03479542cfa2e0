"""The contract between HTTP and API formats: neutral requests, writers, errors, field types."""
