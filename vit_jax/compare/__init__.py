"""Where runs begin to differ, and what may be the reason."""
