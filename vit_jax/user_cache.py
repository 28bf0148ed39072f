"""The user's cache folder: what took long to find out or to compile, for the next start. It may be deleted at any time.

It is $VIT_JAX_CACHE, else vit_jax in $XDG_CACHE_HOME, else ~/.cache/vit_jax.
"""

import os
import pathlib
import tempfile

import jax

# Where one of them is set, it decides about compiled programs.
JAX_VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")


def folder() -> pathlib.Path:
    if given := os.environ.get("VIT_JAX_CACHE"):
        return pathlib.Path(given)
    try:
        return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "vit_jax"
    except RuntimeError:  # a user without a home, as in some containers
        return pathlib.Path(tempfile.gettempdir()) / "vit_jax"


def keep_programs() -> None:
    """Programs that this process compiles are kept there, and found by the next one that would compile the same."""
    if not any(name in os.environ for name in JAX_VARIABLES):
        jax.config.update("jax_compilation_cache_dir", str(folder() / "programs"))
