"""One job on many devices and processes: mesh, sharding, messages, failures, and the hardware."""
