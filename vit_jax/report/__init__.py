"""The page of a run: one HTML file that shows what it did, without a network."""

from collections.abc import Sequence


def write(paths: Sequence[str], out: str | None = None):
    """See `page.write`, which is imported only here, with Bokeh."""
    from vit_jax.report import page

    return page.write(paths, out)
