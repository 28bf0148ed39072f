"""The folder into which figures are written, local or on a store."""

import io

import numpy as np
from etils import epath
from matplotlib.figure import Figure

from vit_jax import cli
from vit_jax.cli import out_folder
from vit_jax.errors import printable
from vit_jax.figures.drawings import png

NUMBERS = "numbers.npz"


class Folder:
    """Writes figures, prints a line for each, and keeps the numbers that they show."""

    def __init__(self, path: str):
        """
        Raises:
          UserError: there can't be such a folder.
        """
        self.path = path
        self.numbers: dict[str, np.ndarray] = {}
        out_folder.make(path)

    def add(self, name: str, figure: Figure, text: str, **numbers) -> None:
        """Writes NAME.png.

        Args:
          text: what it shows.
          numbers: arrays for numbers.npz.

        Raises:
          UserError: it can't be written.
        """
        self.write(f"{name}.png", png(figure), text)
        self.numbers |= numbers

    def close(self) -> None:
        """Writes the numbers of all figures."""
        if not self.numbers:
            return
        content = io.BytesIO()
        np.savez(content, **self.numbers)
        self.write(NUMBERS, content.getvalue(), f"{', '.join(self.numbers)} as arrays")

    def write(self, name: str, content: bytes, text: str) -> None:
        path = epath.Path(self.path) / name
        try:
            cli.replace_file(path, content)
        except OSError as error:
            raise out_folder.write_error(self.path, error) from None
        print(printable(f"{path}: {text}"))
