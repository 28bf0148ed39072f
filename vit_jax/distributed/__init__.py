"""One job on many devices and processes."""
