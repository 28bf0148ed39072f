"""What a run optimizes, one file each; `config.objective` chooses."""
