"""Where runs part, and what may be the reason."""
