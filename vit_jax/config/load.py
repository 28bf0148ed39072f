"""The way from a config file and command-line overrides to one locked, checked config."""

import difflib
import importlib.util
import json
import pathlib
import re
from collections.abc import Mapping

import ml_collections
from absl import flags
from ml_collections import config_flags

from vit_jax.config.defaults import (
    defaults,
    eval_defaults,
    flatten,
    generic,
    known_keys,
    vtab_defaults,
)
from vit_jax.config.rules import BRANCHES, CHOICES, NUMBERS, PAIRS, RANGES, check_whole
from vit_jax.errors import UserError


def fail(key: str, what: str, where: str) -> None:
    raise UserError(f"config key {key}{what} in {where}")


def check_key(key: str, where: str) -> None:
    known = known_keys()
    if generic(key) not in known:
        close = difflib.get_close_matches(generic(key), known, n=1)
        tops = sorted({name.split(".")[0] + ".*" * ("." in name) for name in known})
        hint = (
            f"did you mean {close[0]}?"
            if close
            else f"known are {', '.join(tops)}: see vit_jax/config/defaults.py"
        )
        fail(key, " is unknown", f"{where}: {hint}")


def check_pairs(key: str, pairs: tuple, where: str) -> tuple:
    """Returns `pairs` as a tuple of tuples with the types of `PAIRS`; anything else is a UserError."""
    first, second = PAIRS[key]
    low, high = RANGES.get(key, (0, 2**31 - 1))
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and type(pair[0]) is first):
            wanted = "a tuple of (text, number)" if first is str else "a tuple of (step, factor)"
            fail(key, f" expects {wanted} pairs, got {pairs!r}", f"{where}: correct it")
        if type(pair[1]) not in (int, second) or not low <= pair[1] <= high:
            fail(
                key,
                f" has a number {pair[1]!r}, not one from {low} to {high},",
                f"{where}: correct it",
            )
    return tuple((left, second(right)) for left, right in pairs)


def check_numbers(key: str, values: tuple, where: str) -> tuple:
    """Returns `values` in the type of `NUMBERS`; one of another type or range is a UserError."""
    kind, low, high = NUMBERS[generic(key)]
    for value in values:
        if type(value) not in (int, kind) or not low <= value <= high:
            fail(
                key,
                f" has {value!r}, which is no {kind.__name__} from {low} to {high},",
                f"{where}: correct it",
            )
    return tuple(map(kind, values))


def check_value(key: str, value, where: str):
    """Returns `value` in the type of the default; wrong type, range or choice is a UserError."""
    default = known_keys()[generic(key)]
    if type(default) is float and type(value) is int:
        value = float(value)
    if type(value) is not type(default):
        fail(key, f" expects {type(default).__name__}, got {value!r}", f"{where}: correct it")
    if key in PAIRS:
        return check_pairs(key, value, where)
    if generic(key) in NUMBERS:
        return check_numbers(key, value, where)
    allowed = CHOICES.get(generic(key))
    if allowed and value not in allowed:
        fail(
            key,
            f"={value!r} is none of {', '.join(map(str, allowed))}",
            f"{where}: choose one of them",
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = RANGES.get(generic(key), (0, 2**31 - 1))
        if not low <= value <= high:
            fail(
                key,
                f"={value} is outside of {low} to {high}",
                f"{where}: choose a value in that range",
            )
    return value


def import_file(path: str):
    """Runs a config file as Python and returns the module."""
    spec = importlib.util.spec_from_file_location(f"config_{pathlib.Path(path).stem}", path)
    if spec is None or not pathlib.Path(path).is_file():
        raise UserError(
            f"config file {path} does not exist or is no .py file: give --config=FILE.py[:ARG]"
        )
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"config file {path} fails to run: {type(error).__name__}: {error}: correct the file"
        ) from error
    return module


def read_file(location: str) -> dict[str, object]:
    """The flat values that FILE.py[:ARG] sets."""
    path, _, arg = location.partition(":")
    module = import_file(path)
    if not hasattr(module, "get_config"):
        raise UserError(f"config file {path} has no function get_config(arg): add one")
    try:
        config = module.get_config(arg) if arg else module.get_config()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"config {location}: get_config fails: {type(error).__name__}: {error}: check the "
            "argument behind the colon"
        ) from error
    if not isinstance(config, Mapping | ml_collections.ConfigDict):
        raise UserError(
            f"config {location}: get_config returns {type(config).__name__}: it must return a dict"
        )
    values = {f"evals.{name}.type": eval_defaults()["type"] for name in config.get("evals", {})}
    for key, value in flatten(config):
        check_key(key, path)
        values[key] = check_value(key, value, path)
    return values


def assemble(values: Mapping[str, object]) -> ml_collections.ConfigDict:
    """Defaults, with an entry for every evaluation that `values` names, updated by flat values."""
    config = defaults()
    if any(key.startswith("vtab.") for key in values):
        config.vtab = ml_collections.ConfigDict(vtab_defaults())
    for key in values:
        if key.startswith("evals."):
            name = key.split(".")[1]
            if name not in config.evals:
                config.evals[name] = ml_collections.ConfigDict(eval_defaults())
    with config.unlocked():
        config.update_from_flattened_dict(values)
    return config


def read_overrides(config: ml_collections.ConfigDict, arguments: list[str]) -> dict[str, object]:
    """Parses --config.a.b=value arguments by the types of `config`; returns the flat values given."""
    where = "the command line"
    for argument in arguments:
        match = re.match(r"--?(?:no)?config\.([^=]*)", argument)
        if match:
            check_key(match[1], where)
            if match[1] not in dict(flatten(config)):
                what = (
                    "VTAB's settings, which"
                    if match[1].startswith("vtab.")
                    else "an evaluation that"
                )
                fail(
                    match[1],
                    f" belongs to {what} the config file does not have",
                    f"{where}: add it there",
                )
    flag_values = flags.FlagValues()
    argv = ["vit_jax", *arguments]
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=flag_values, sys_argv=argv)
        rest = flag_values(argv)
    except (flags.Error, ValueError, TypeError, LookupError) as error:
        raise UserError(f"{error} on {where}: correct the value") from None
    if len(rest) > 1:
        raise UserError(
            f"argument {rest[1]!r} is not understood: overrides are written --config.KEY=VALUE"
        )
    given = config_flags.get_override_values(flag_values["config"])
    return {key: check_value(key, value, where) for key, value in given.items()}


def drop_branches(config: ml_collections.ConfigDict, in_file: Mapping, on_line: Mapping) -> None:
    """Removes the keys of branches that are not chosen; a key that was given for one of them is a
    UserError.

    Values that a file gives for its own choice are dropped when the command line chooses another
    one.
    """
    flat = dict(flatten(config))
    for key in list(flat):
        selector, allowed = BRANCHES.get(generic(key), ("", ()))
        if key.startswith("evals."):
            selector = selector.replace("*", key.split(".")[1])
        if not selector or flat[selector] in allowed:
            continue
        if key in on_line or (key in in_file and selector not in on_line):
            where = "on the command line" if key in on_line else "in the config file"
            raise UserError(
                f"config key {key} {where} has no effect with {selector}={flat[selector]}: "
                f"leave it out, or choose {selector}={' or '.join(map(str, allowed))}"
            )
        parent = config
        *path, leaf = key.split(".")
        for part in path:
            parent = parent[part]
        del parent[leaf]


def load(location: str, arguments: list[str] = ()) -> ml_collections.ConfigDict:
    """Makes the locked config of a run: defaults, then FILE.py[:ARG], then --config.KEY=VALUE
    arguments.

    Raises:
      UserError: unknown key, wrong type, impossible value, or a key of a branch that is not chosen.
    """
    in_file = read_file(location)
    on_line = read_overrides(assemble(in_file), list(arguments))
    for key, other in (("total_steps", "total_epochs"), ("total_epochs", "total_steps")):
        if on_line.get(key) and other not in on_line:
            in_file.pop(other, None)  # the command line's length of the run replaces the file's
    config = assemble(in_file | on_line)
    drop_branches(config, in_file, on_line)
    check_whole(config)
    return config.lock()


def to_json(config: ml_collections.ConfigDict) -> dict:
    return json.loads(config.to_json())
