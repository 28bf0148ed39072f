"""Names in CSV files."""

from vit_jax.errors import printable


def cell(text: str) -> str:
    """A name in a CSV; spreadsheets run what begins like a formula."""
    text = printable(text, kept="")
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
