"""Every key of a config, and the way from a file and command-line overrides to one locked, checked
config.
"""

from vit_jax.config.defaults import (
    as_tuple,
    defaults,
    eval_defaults,
    flatten,
    generic,
    known_keys,
    vtab_defaults,
)
from vit_jax.config.load import check_key, check_value, import_file, load, to_json
from vit_jax.config.rules import BRANCHES, CHOICES, RANGES

__all__ = [
    "BRANCHES",
    "CHOICES",
    "RANGES",
    "as_tuple",
    "check_key",
    "check_value",
    "defaults",
    "eval_defaults",
    "flatten",
    "generic",
    "import_file",
    "known_keys",
    "load",
    "to_json",
    "vtab_defaults",
]
