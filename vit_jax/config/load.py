"""The way from a config file and command-line overrides to one locked, checked config."""

import functools
import importlib.util
import json
import operator
import os
import pathlib
from collections.abc import Mapping

import ml_collections

from vit_jax.config import own_parts
from vit_jax.config.defaults import (
    defaults,
    eval_defaults,
    find,
    flatten,
    vtab_defaults,
)
from vit_jax.config.key import is_own
from vit_jax.config.model import OF_WEIGHTS
from vit_jax.config.overrides import (
    COMMAND_LINE,
    add_own_key,
    check_key,
    check_value,
    read_overrides,
)
from vit_jax.config.rules import check_whole
from vit_jax.errors import UserError

NO_EVALS = "--config.evals={}"  # leaves out the evaluations of the file
PACKAGE = pathlib.Path(__file__).parent.parent


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


def call_file(location: str) -> Mapping | ml_collections.ConfigDict:
    """What `get_config` of FILE.py[:ARG] returns.

    Raises:
      UserError: there is no such file or function, it fails, or returns no dict.
    """
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
    return config


def read_file(location: str) -> dict[str, object]:
    """The flat values that FILE.py[:ARG] sets."""
    return read_config(call_file(location), f"in {location.partition(':')[0]}")


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


def selector_of(name: str) -> tuple[str, tuple] | None:
    """(the key that decides whether this one counts, the values with which it does), or None."""
    for selector, values in find(name).only_if.items():
        if name.startswith("evals."):
            selector = selector.replace("*", name.split(".")[1])
        return selector, values
    return None


def excluded_by(name: str, flat: Mapping) -> tuple[str, tuple] | None:
    """(the key whose value leaves this one without effect, the values with which it has one), or
    None. A part of the user's own may read the keys of all branches.
    """
    branch = selector_of(name)
    if not branch:
        return None
    selector, values = branch
    chosen = flat[selector]
    if chosen in values or (find(selector).choices and is_own(chosen)):
        return excluded_by(selector, flat)
    return branch


def drop_branches(
    config: ml_collections.ConfigDict, in_file: Mapping, given: Mapping, given_where: str
) -> None:
    """Removes the keys of branches that are not chosen; one that was given is a UserError.

    Values that a file gives for its own choice are dropped when an override chooses another.

    Args:
      given: overrides, and `given_where` they are.
    """
    flat = dict(flatten(config))
    for name in flat:
        branch = excluded_by(name, flat)
        if not branch:
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
    arguments = list(arguments)
    if NO_EVALS in arguments:
        values = without_evals(values)
        arguments = [argument for argument in arguments if argument != NO_EVALS]
    on_line = read_overrides(assemble(values), arguments)
    return override(dict(values), on_line, COMMAND_LINE)


def without_evals(values: Mapping[str, object]) -> dict[str, object]:
    """Flat values without the evaluations."""
    return {name: value for name, value in values.items() if not name.startswith("evals.")}


def load_in_python(config, overrides) -> ml_collections.ConfigDict:
    """The same from Python: see `vit_jax.load_config`."""
    is_file = isinstance(config, str | os.PathLike)
    if is_file:
        values = read_file(os.fspath(config))
    else:
        must_be_dict(config, "a config", "FILE.py[:ARG], or a dict")
        values = read_config(set_values(config), "in the config")
    must_be_dict(overrides, "overrides", "a dict")
    if overrides.get("evals") == {}:
        values = without_evals(values)
    where = "in the overrides"
    result = override(values, check_values(overrides, where), where)
    if is_file:
        look_beside(os.fspath(config), result)
    return result


def look_beside(location: str, config) -> None:
    """Finds parts of the user's own in the folder of the config FILE.py[:ARG], too."""
    own_parts.look_beside(locate(location.partition(":")[0]), config)


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
