"""Studies: many runs of one recipe, their cost, and what they show together."""
