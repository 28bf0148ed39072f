"""The way from a config file and command-line overrides to one locked, checked config."""

import difflib
import functools
import importlib.util
import json
import operator
import pathlib
import re
from collections.abc import Mapping

import ml_collections
from absl import flags
from ml_collections import config_flags

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
from vit_jax.config.rules import check_whole
from vit_jax.errors import UserError

PACKAGE = pathlib.Path(__file__).parent.parent
COMMAND_LINE = "on the command line"


def check_key(name: str, where: str) -> None:
    """Raises UserError if there is no such key, and names the nearest one."""
    if find(name):
        return
    close = difflib.get_close_matches(generic(name), KEYS, n=1)
    if close:
        hint = f"did you mean {close[0]}?"
    else:
        groups = sorted({key.split(".")[0] + ".*" * ("." in key) for key in KEYS})
        hint = f"known are {', '.join(groups)}: see vit_jax/config/defaults.py"
    raise UserError(f"config key {name} is unknown {where}: {hint}")


def check_value(name: str, value, where: str):
    """Returns `value` in the type of the default; a wrong type, range or choice is a UserError."""
    try:
        return find(name).check(value)
    except ValueError as error:
        raise UserError(f"config key {name}{error}, {where}: correct it") from None


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
    # An evaluation that sets nothing exists all the same.
    values = {f"evals.{name}.type": eval_defaults()["type"] for name in config.get("evals", {})}
    for name, value in flatten(config):
        check_key(name, f"in {path}")
        values[name] = check_value(name, value, f"in {path}")
    return values


def assemble(values: Mapping[str, object]) -> ml_collections.ConfigDict:
    """Defaults, with an entry for every evaluation that `values` names, updated by flat values."""
    config = defaults()
    if any(name.startswith("vtab.") for name in values):
        config.vtab = ml_collections.ConfigDict(vtab_defaults())
    for evaluation in {name.split(".")[1] for name in values if name.startswith("evals.")}:
        config.evals[evaluation] = ml_collections.ConfigDict(eval_defaults())
    with config.unlocked():
        config.update_from_flattened_dict(values)
    return config


def read_overrides(config: ml_collections.ConfigDict, arguments: list[str]) -> dict[str, object]:
    """Parses --config.a.b=value arguments by the types of `config`; returns the flat values."""
    present = dict(flatten(config))
    for argument in arguments:
        match = re.match(r"--?(?:no)?config\.([^=]*)", argument)
        if not match:
            continue
        check_key(match[1], COMMAND_LINE)
        if match[1] not in present:
            is_vtab = match[1].startswith("vtab.")
            what = "VTAB's settings, which" if is_vtab else "an evaluation that"
            raise UserError(
                f"config key {match[1]} belongs to {what} the config file does not have, "
                f"{COMMAND_LINE}: add it there"
            )
    flag_values = flags.FlagValues()
    argv = ["vit_jax", *arguments]
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
    return {name: check_value(name, value, COMMAND_LINE) for name, value in given.items()}


def selector_of(name: str) -> tuple[str, tuple] | None:
    """(the key that decides whether this one counts, the values with which it does), or None."""
    for selector, values in find(name).only_if.items():
        if name.startswith("evals."):
            selector = selector.replace("*", name.split(".")[1])
        return selector, values
    return None


def drop_branches(config: ml_collections.ConfigDict, in_file: Mapping, on_line: Mapping) -> None:
    """Removes the keys of branches that are not chosen; one that was given is a UserError.

    Values that a file gives for its own choice are dropped when the command line chooses another.
    """
    flat = dict(flatten(config))
    for name in flat:
        branch = selector_of(name)
        if not branch or flat[branch[0]] in branch[1]:
            continue
        selector, values = branch
        if name in on_line or (name in in_file and selector not in on_line):
            where = COMMAND_LINE if name in on_line else "in the config file"
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
    return from_values(read_file(location), arguments)


def from_values(
    values: Mapping[str, object], arguments: list[str] = ()
) -> ml_collections.ConfigDict:
    """`load` with flat values in place of a file."""
    in_file = dict(values)
    on_line = read_overrides(assemble(in_file), list(arguments))
    for name, other in (("total_steps", "total_epochs"), ("total_epochs", "total_steps")):
        if on_line.get(name) and other not in on_line:
            in_file.pop(other, None)  # the length on the command line replaces that of the file
    config = assemble(in_file | on_line)
    drop_branches(config, in_file, on_line)
    check_whole(config)
    if config.init_from:
        leave_to_weights(config, in_file | on_line)
    return config.lock()


def to_json(config: ml_collections.ConfigDict) -> dict:
    return json.loads(config.to_json())
