"""What a run saves, and how it is read back."""
