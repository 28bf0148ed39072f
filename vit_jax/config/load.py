"""The way from a config file and command-line overrides to one locked, checked config."""

import ast
import difflib
import functools
import importlib.util
import json
import operator
import os
import pathlib
import re
from collections.abc import Mapping

import ml_collections
from absl import flags
from ml_collections import config_flags

from vit_jax.config import meanings, own_parts
from vit_jax.config.defaults import (
    KEYS,
    OF_WEIGHTS,
    defaults,
    eval_defaults,
    find,
    flatten,
    generic,
    vtab_defaults,
)
from vit_jax.config.key import is_own
from vit_jax.config.rules import check_whole
from vit_jax.errors import UserError

PACKAGE = pathlib.Path(__file__).parent.parent
FLAGS = ("init_from", "workdir")  # of commands that start or continue a run
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


def import_file(path: str | pathlib.Path):
    """Runs a config file as Python and returns the module."""
    path = locate(str(path))
    spec = importlib.util.spec_from_file_location(f"config_{pathlib.Path(path).stem}", path)
    if spec is None or not pathlib.Path(path).is_file():
        raise UserError(
            f"config file {path} does not exist or is not a .py file: give --config=FILE.py[:ARG]"
        )
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"config file {path} fails to run: {type(error).__name__}: {error}: correct the file"
        ) from error
    return module


def locate(path: str) -> str:
    """A config file as it is given, or that of an installed package by the same name.

    `configs/NAME.py` is a folder of a checkout; an installed package has it inside.
    """
    if pathlib.Path(path).exists() or not path.startswith("configs/"):
        return path
    for root in (PACKAGE, PACKAGE.parent):
        if (root / path).is_file():
            return str(root / path)
    return path


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
            "argument after the colon"
        ) from error
    if not isinstance(config, Mapping | ml_collections.ConfigDict):
        raise UserError(
            f"config {location}: get_config returns {type(config).__name__}: it must return a dict"
        )
    return read_config(config, f"in {path}")


def check_values(config: Mapping, where: str) -> dict[str, object]:
    """The flat values of a config, checked one by one."""
    values = {}
    for name, value in flatten(config):
        check_key(name, where)
        values[name] = check_value(name, value, where)
    return values


def read_config(config: Mapping, where: str) -> dict[str, object]:
    """The same, where an evaluation that sets nothing exists all the same."""
    types = {f"evals.{name}.type": eval_defaults()["type"] for name in config.get("evals", {})}
    return types | check_values(config, where)


def assemble(values: Mapping[str, object]) -> ml_collections.ConfigDict:
    """Defaults, with an entry for every evaluation that `values` names, updated by flat values."""
    config = defaults()
    if any(name.startswith("vtab.") for name in values):
        config.vtab = ml_collections.ConfigDict(vtab_defaults())
    for evaluation in {name.split(".")[1] for name in values if name.startswith("evals.")}:
        config.evals[evaluation] = ml_collections.ConfigDict(eval_defaults())
    with config.unlocked():
        for name, value in values.items():
            if name.startswith("user."):
                add_own_key(config, name, value)
        config.update_from_flattened_dict(values)
    return config


def check_flag(argument: str) -> None:
    """Raises UserError for an argument that is a flag, which no command with a config has, and says
    which key is meant.
    """
    flag = re.match(r"--?([A-Za-z][\w-]*)", argument)
    if not flag:
        return
    near = difflib.get_close_matches(flag[1].replace("-", "_"), FLAGS, n=1, cutoff=0.8)
    meant = f"--{near[0]}" if near else meanings.key_meant(flag[1], KEYS) or "KEY"
    written = meant if meant.startswith("--") else f"--config.{meant}"
    raise UserError(
        f"argument {argument.partition('=')[0]} is unknown {COMMAND_LINE}: write {written}=VALUE"
    )


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


def selector_of(name: str) -> tuple[str, tuple] | None:
    """(the key that decides whether this one counts, the values with which it does), or None."""
    for selector, values in find(name).only_if.items():
        if name.startswith("evals."):
            selector = selector.replace("*", name.split(".")[1])
        return selector, values
    return None


def drop_branches(
    config: ml_collections.ConfigDict, in_file: Mapping, given: Mapping, given_where: str
) -> None:
    """Removes the keys of branches that are not chosen; one that was given is a UserError. A part
    of the user's own may read the keys of all branches.

    Values that a file gives for its own choice are dropped when an override chooses another.

    Args:
      given: overrides, and `given_where` they are.
    """
    flat = dict(flatten(config))
    for name in flat:
        branch = selector_of(name)
        if not branch or flat[branch[0]] in branch[1]:
            continue
        if find(branch[0]).choices and is_own(flat[branch[0]]):
            continue
        selector, values = branch
        if name in given or (name in in_file and selector not in given):
            where = given_where if name in given else "in the config file"
            raise UserError(
                f"config key {name} {where} has no effect with {selector}={flat[selector]}: "
                f"leave it out, or choose {selector}={' or '.join(map(str, values))}"
            )
        *groups, leaf = name.split(".")
        group = functools.reduce(operator.getitem, groups, config)
        del group[leaf]


def leave_to_weights(config: ml_collections.ConfigDict, given: Mapping) -> None:
    """Sets the keys that describe a model to None, but for those that are given."""
    for name in OF_WEIGHTS:
        if name in config.model and f"model.{name}" not in given:
            config.model[name] = None


def load(location: str, arguments: list[str] = ()) -> ml_collections.ConfigDict:
    """Makes the locked config of a run: defaults, FILE.py[:ARG], then --config.KEY=VALUE arguments.

    With `init_from`, what nobody sets of the model is None: `experiment.make_model` takes it from
    the weights.

    Raises:
      UserError: unknown key, wrong type, impossible value, or a key of a branch that is not chosen.
    """
    config = from_values(read_file(location), arguments)
    look_beside(location, config)
    return config


def from_values(
    values: Mapping[str, object], arguments: list[str] = ()
) -> ml_collections.ConfigDict:
    """`load` with flat values in place of a file."""
    on_line = read_overrides(assemble(values), list(arguments))
    return override(dict(values), on_line, COMMAND_LINE)


def load_in_python(config, overrides) -> ml_collections.ConfigDict:
    """The same from Python: see `vit_jax.load_config`."""
    is_file = isinstance(config, str | os.PathLike)
    if is_file:
        values = read_file(os.fspath(config))
    else:
        must_be_dict(config, "a config", "FILE.py[:ARG], or a dict")
        values = read_config(set_values(config), "in the config")
    must_be_dict(overrides, "overrides", "a dict")
    where = "in the overrides"
    result = override(values, check_values(overrides, where), where)
    if is_file:
        look_beside(os.fspath(config), result)
    return result


def look_beside(location: str, config) -> None:
    """Finds parts of the user's own in the folder of the config FILE.py[:ARG], too."""
    own_parts.look_beside(location.partition(":")[0], config)


def set_values(config: Mapping) -> Mapping:
    """A config without what it leaves to weights: None, and if it was loaded without `init_from`,
    which fills in the rest, the defaults.
    """
    is_loaded = getattr(config, "is_locked", False)
    if not is_loaded or "model" not in config:
        return config
    given = {
        name: value
        for name, value in config.model.items()
        if name not in OF_WEIGHTS or value not in (None, OF_WEIGHTS[name].default)
    }
    return config.to_dict() | dict(model=given)


def must_be_dict(value, what: str, instead: str) -> None:
    if not isinstance(value, Mapping | ml_collections.ConfigDict):
        raise UserError(f"{what} of type {type(value).__name__} can't be read: give {instead}")


def override(values: dict, given: Mapping, given_where: str) -> ml_collections.ConfigDict:
    """The locked config of flat values, of which some are `given` anew; checked as a whole."""
    values = dict(values)
    for name, other in (("total_steps", "total_epochs"), ("total_epochs", "total_steps")):
        if given.get(name) and other not in given:
            values.pop(other, None)  # the length that is given replaces that of the file
    config = assemble(values | given)
    drop_branches(config, values, given, given_where)
    check_whole(config)
    if config.init_from:
        leave_to_weights(config, values | given)
    return config.lock()


def to_json(config: ml_collections.ConfigDict) -> dict:
    return json.loads(config.to_json())
