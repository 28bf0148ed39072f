"""Downloading, converting and shrinking data sets."""
