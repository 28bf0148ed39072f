"""Files of a folder that may be on a store, may be written at this moment, and may be damaged.

A page shows what can be read, and says in a line what can't.
"""

import json
import os
from collections.abc import Callable

from vit_jax.cli import objects, regular
from vit_jax.errors import one_line, storage_problem

MISSING = (FileNotFoundError, NotADirectoryError)


def problem_of(error: Exception) -> str:
    problem = storage_problem(error) or one_line(error)
    return (problem or type(error).__name__)[:200]


class Folder:
    """Reads a folder, local or on a store, without TensorFlow."""

    def __init__(self, path: str, problems: list[str] | None = None):
        """`problems`: the list that takes a line for each file that can't be read."""
        self.path = path.rstrip("/") or path
        self.problems = [] if problems is None else problems

    def below(self, name: str) -> "Folder":
        """A folder in it, which need not exist, with the same list of problems."""
        return Folder(self.path_of(name), self.problems)

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def note(self, name: str, error: Exception) -> None:
        self.problems.append(f"{self.path_of(name)} can't be read: {problem_of(error)}")

    def names(self) -> list[str]:
        """Files and folders directly in it, in alphabetical order; none if it does not exist."""
        try:
            if objects.is_object(f"{self.path}/"):
                return objects.names(f"{self.path}/")
            return sorted(os.listdir(self.path))
        except MISSING:
            return []
        except Exception as error:  # every store has errors of its own
            self.note("", error)
            return []

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none, or it can't be read."""
        path = self.path_of(name)
        try:
            if objects.is_object(path):
                return objects.content(path)
            with regular.open_file(path) as file:
                return file.read()
        except MISSING:
            return None
        except Exception as error:  # every store has errors of its own
            self.note(name, error)
            return None

    def parsed(self, name: str, parse: Callable[[str], object]):
        """What `parse` makes of the text of a file; None if there is none, or it is damaged.

        Args:
          parse: raises any exception for what is damaged.
        """
        content = self.read(name)
        if content is None:
            return None
        try:
            return parse(content.decode(errors="replace"))
        except Exception as error:  # whatever a damaged file leads to
            self.note(name, error)
            return None

    def json(self, name: str) -> dict:
        """A JSON object; {} if there is none, or it is damaged."""
        return self.parsed(name, parse_object) or {}


def parse_object(text: str) -> dict:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def parse_lines(text: str) -> list[dict]:
    """The JSON objects of a file that has one on each line, without incomplete lines."""
    found = []
    for line in text.splitlines():
        try:
            found.append(parse_object(line))
        except (ValueError, RecursionError):
            continue
    return found
