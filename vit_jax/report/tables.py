"""Tables of a page: cells are text, and the template draws them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Table:
    head: list[str]
    rows: list[list[str]]  # the first cell names the row

    @property
    def is_filled(self) -> bool:
        """Whether any cell has something to say."""
        return any(cell for row in self.rows for cell in row[1:])

    def without_empty_rows(self) -> "Table":
        return Table(self.head, [row for row in self.rows if any(row[1:])])


def seconds_text(seconds: float) -> str:
    """A duration, such as "12.3 s", "4.5 min" or "6.7 h"."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
