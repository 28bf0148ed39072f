"""Overrides: from --config.KEY=VALUE on the command line to values, checked one by one."""

import ast
import difflib
import re

import ml_collections
from absl import flags
from ml_collections import config_flags

from vit_jax.config import meanings
from vit_jax.config.defaults import KEYS, find, flatten, generic
from vit_jax.errors import UserError

COMMAND_LINE = "on the command line"


def check_key(name: str, where: str) -> None:
    """Raises UserError if there is no such key, and names the nearest one."""
    if find(name):
        return
    meant = meanings.key_meant(name, KEYS)
    close = difflib.get_close_matches(generic(name), KEYS, n=1)
    if meant:
        hint = f"did you mean {meant}?"
    elif close:
        hint = f"did you mean {close[0]}?"
    else:
        groups = sorted({key.split(".")[0] + ".*" * ("." in key) for key in KEYS})
        known = ", ".join(groups)
        hint = f"known are {known}: see vit_jax/config/defaults.py; your own go below user"
    raise UserError(f"config key {name} is unknown {where}: {hint}")


def check_value(name: str, value, where: str):
    """Returns `value` in the type of the default; a wrong type, range or choice is a UserError."""
    try:
        return find(name).check(value)
    except ValueError as error:
        meant = meanings.value_meant(generic(name), value)
        raise UserError(f"config key {name}{error}, {where}: correct it{meant}") from None


def check_flag(argument: str) -> None:
    """Raises UserError for an argument that is a flag, which no command with a config has, and says
    what is meant.
    """
    flag = re.match(r"--?([A-Za-z][\w-]*)", argument)
    if flag:
        name = argument.partition("=")[0]
        meant = meanings.flag_meant(flag[1], KEYS)
        raise UserError(f"argument {name} is unknown {COMMAND_LINE}: write {meant}=VALUE")


def add_own_key(config: ml_collections.ConfigDict, name: str, value) -> None:
    """Adds a key below `config.user`, with its groups."""
    *groups, leaf = name.split(".")
    for group in groups:
        if group not in config:
            config[group] = ml_collections.ConfigDict()
        config = config[group]
        if not isinstance(config, ml_collections.ConfigDict):
            raise UserError(f"config key {name} is below {group}, which is a value: rename one")
    if isinstance(config.get(leaf), ml_collections.ConfigDict):
        raise UserError(f"config key {name} is a group of keys: give one of them, or rename it")
    if leaf in config:
        del config[leaf]  # which may have another type
    config[leaf] = value


def from_text(text: str, before):
    """A value of the command line for a key of the user's own: a Python literal, or text, as the
    value `before` from the file is.
    """
    if isinstance(before, str):
        return text
    if text in ("true", "false"):
        return text == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return float(value) if type(before) is float and type(value) is int else value


def read_overrides(config: ml_collections.ConfigDict, arguments: list[str]) -> dict[str, object]:
    """Parses --config.a.b=value arguments by the types of `config`; returns the flat values."""
    present = dict(flatten(config))
    own = {}
    own_arguments = []
    for argument in arguments:
        match = re.match(r"--?(?:no)?config\.([^=]*)", argument)
        if not match:
            check_flag(argument)
            continue
        check_key(match[1], COMMAND_LINE)
        if match[1].startswith("user."):
            if "=" not in argument:
                raise UserError(f"{argument} has no value: write --config.{match[1]}=VALUE")
            value = from_text(argument.partition("=")[2], present.get(match[1]))
            own[match[1]] = check_value(match[1], value, COMMAND_LINE)
            add_own_key(config, match[1], own[match[1]])
            present[match[1]] = value
            own_arguments.append(argument)
        if match[1] not in present:
            is_vtab = match[1].startswith("vtab.")
            what = "VTAB's settings, which" if is_vtab else "an evaluation that"
            raise UserError(
                f"config key {match[1]} belongs to {what} the config file does not have, "
                f"{COMMAND_LINE}: add it there"
            )
    flag_values = flags.FlagValues()
    argv = ["vit_jax", *(text for text in arguments if text not in own_arguments)]
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=flag_values, sys_argv=argv)
        rest = flag_values(argv)
    except (flags.Error, ValueError, TypeError, LookupError) as error:
        raise UserError(f"{error} {COMMAND_LINE}: correct the value") from None
    if len(rest) > 1:
        raise UserError(
            f"argument {rest[1]!r} is not understood: overrides are written --config.KEY=VALUE"
        )
    given = config_flags.get_override_values(flag_values["config"])
    return own | {name: check_value(name, value, COMMAND_LINE) for name, value in given.items()}
