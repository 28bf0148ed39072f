"""From a path or a name to records: one kind of source a file."""
