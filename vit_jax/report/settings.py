"""The commands of runs, and how their configs differ from defaults and from each other."""

import importlib.util
import json
import os
import shlex
from collections.abc import Mapping, Sequence

from vit_jax import config as configs

PACKAGE = "vit_jax"
MISSING = "(unset)"


def command_of(words: Sequence[str]) -> list[str]:
    """The command to type for what `sys.argv` was; [] if a run was begun from Python.

    `python -m vit_jax.train`, `python -m vit_jax train` and `vit_jax train` are the same.
    """
    program, *arguments = words or [""]
    folder, name = os.path.split(os.path.splitext(program)[0].removesuffix("/__main__"))
    if name == PACKAGE and arguments:
        name = arguments.pop(0)
    elif os.path.basename(folder) != PACKAGE:
        return []
    return ["python", "-m", f"{PACKAGE}.{name}", *arguments] if is_module(name) else []


def is_module(name: str) -> bool:
    """Whether there is `vit_jax.NAME`; a script of the user's may be in a folder called vit_jax."""
    return name.isidentifier() and importlib.util.find_spec(f"{PACKAGE}.{name}") is not None


def command_text(words: Sequence[str]) -> str:
    """The command in one line for a shell; "" if a run was begun from Python."""
    return shlex.join(command_of(words))


def begun_from(words: Sequence[str]) -> str:
    """How a run began, if not by a command."""
    name = os.path.basename(words[0]) if words else ""
    return f"from Python (vit_jax.fit in {name})" if name else "from Python (vit_jax.fit)"


def overrides(words: Sequence[str]) -> list[str]:
    """What a command changed in its recipe, such as "optim.lr=0.003"."""
    found = []
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        flag = name.lstrip("-")
        if not word.startswith("-") or not flag.startswith(("config.", "noconfig.")):
            continue
        if flag.startswith("noconfig."):
            found.append(f"{flag.removeprefix('noconfig.')}=False")
        elif equals:
            found.append(f"{flag.removeprefix('config.')}={value}")
        else:
            follows = [word for word in words[i + 1 : i + 2] if not word.startswith("-")]
            found.append(f"{flag.removeprefix('config.')}={(follows or ['True'])[0]}")
    return found


def recipe(words: Sequence[str]) -> str:
    """The FILE.py[:ARG] of a command; "" if it has none."""
    for i, word in enumerate(words):
        if word.startswith("--config="):
            return word.removeprefix("--config=")
        if word == "--config":
            return "".join(words[i + 1 : i + 2])
    return ""


def from_defaults(flat: Mapping) -> list[tuple[str, str, str, str]]:
    """(key, value, default, meaning) of every key with another value than the default."""
    rows = []
    for key, value in flat.items():
        entry = configs.find(key)
        if entry is None:
            rows.append((key, show(value), MISSING, ""))
        elif value != configs.as_tuple(entry.default):
            rows.append((key, show(value), show(entry.default), entry.meaning))
    return rows


def between(flats: Sequence[Mapping]) -> list[tuple[str, list[str]]]:
    """(key, value in each config) of the keys with different values."""
    keys = dict.fromkeys(key for flat in flats for key in flat)
    rows = []
    for key in keys:
        values = [show(flat[key]) if key in flat else MISSING for flat in flats]
        if len(set(values)) > 1:
            rows.append((key, values))
    return rows


def show(value) -> str:
    """A value as it would be written on a command line, in a few hundred letters at most."""
    text = value if isinstance(value, str) and value else json.dumps(value, default=str)
    return text if len(text) <= 300 else f"{text[:300]}..."
