"""Tables of a page: cells are text, and the template draws them."""

import dataclasses
from collections.abc import Iterable, Sequence


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


@dataclasses.dataclass(frozen=True)
class Table:
    head: list[str]
    rows: list[list[str]]  # the first cell names the row
    has_runs: bool = False  # as columns, after the first one

    @classmethod
    def of_runs(cls, labels: list[str], rows: list[list[str]]) -> "Table":
        """A column for each run; rows with nothing to say are left out."""
        return cls(["", *labels], [row for row in rows if any(row[1:])], has_runs=True)
