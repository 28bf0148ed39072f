"""The terminal, for tables."""

import rich.console

from vit_jax.errors import printable


class Console(rich.console.Console):
    """Shows text as it is: names of files and classes may look like markup or emoji of Rich, or
    hold what would control the terminal.
    """

    def __init__(self, **options):
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options):
        return super().render_str(printable(text), **options)
