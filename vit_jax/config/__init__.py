"""Every key of a config, and the way from a file and overrides to one checked config."""

from vit_jax.config.defaults import (
    KEYS,
    as_tuple,
    defaults,
    eval_defaults,
    find,
    flatten,
    generic,
    known_keys,
    may_change,
    may_differ_by_host,
    shapes_state,
    vtab_defaults,
)
from vit_jax.config.key import is_own
from vit_jax.config.load import (
    assemble,
    call_file,
    from_values,
    import_file,
    load,
    load_in_python,
    override,
    to_json,
)
from vit_jax.config.model import MODEL
from vit_jax.config.objectives import has_views, uses_labels
from vit_jax.config.overrides import check_key, check_value, read_overrides

__all__ = [
    "KEYS",
    "MODEL",
    "as_tuple",
    "assemble",
    "call_file",
    "check_key",
    "check_value",
    "defaults",
    "eval_defaults",
    "find",
    "flatten",
    "from_values",
    "generic",
    "has_views",
    "import_file",
    "is_own",
    "known_keys",
    "load",
    "load_in_python",
    "may_change",
    "may_differ_by_host",
    "override",
    "read_overrides",
    "shapes_state",
    "to_json",
    "uses_labels",
    "vtab_defaults",
]
