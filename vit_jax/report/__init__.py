"""The page of a run: one HTML file that shows what it did, without a network."""
