"""The user's cache folder: what took long to find out or to compile, for the next start. It may be
deleted at any time.

It is $VIT_JAX_CACHE, else vit_jax in $XDG_CACHE_HOME, else ~/.cache/vit_jax.
"""

import contextlib
import ctypes
import gc
import os
import pathlib
import sys
import tempfile

import jax

from vit_jax.distributed import processes
from vit_jax.errors import UserError

# Where one of them is set, it decides about compiled programs.
JAX_VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")


def folder() -> pathlib.Path:
    if given := os.environ.get("VIT_JAX_CACHE"):
        return pathlib.Path(given)
    try:
        return (
            pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
            / "vit_jax"
        )
    except RuntimeError:  # a user without a home, as in some containers
        return pathlib.Path(tempfile.gettempdir()) / "vit_jax"


def keep_programs() -> None:
    """Programs that this process compiles are kept there, and found by the next one that would
    compile the same.
    """
    if not any(name in os.environ for name in JAX_VARIABLES):
        jax.config.update("jax_compilation_cache_dir", str(folder() / "programs"))


def check_fits(num_bytes: int, what) -> None:
    """Raises UserError where `what` would take more bytes than this machine has."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > machine:
        raise UserError(
            f"{what} declares {num_bytes / 2**30:,.1f} GiB of arrays, more than the "
            f"{machine / 2**30:,.1f} GiB of memory here: it is damaged or not what it should be; "
            "choose another, or a larger machine"
        )


@contextlib.contextmanager
def without_collections():
    """No search for cyclic garbage meanwhile: what tracing makes, stays, and each search goes
    through all of it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, NEVER = -1, -3, -1  # of glibc's mallopt


def glibc(name: str):
    """A function of glibc, or one that does nothing where it is not there."""
    return (
        getattr(ctypes.CDLL(None), name, lambda *_: 0) if sys.platform == "linux" else lambda *_: 0
    )


def keep_memory() -> None:
    """On CPUs a step computes in the memory that the one before has left. To be called before the
    first device.

    XLA asks for the memory of a step each time anew, and glibc gives large blocks back to the
    kernel, which clears
    every page again: 547 MiB in a step of Ti/16 with 16 images, a sixth of its time. So glibc keeps
    them, in the heap of the main thread, because those of others hold 64 MiB at most; and the main
    thread computes a step before it asks for the next, because steps that are dispatched ahead hold
    their memory from then on.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if jax.default_backend() == "cpu":
        glibc("mallopt")(M_MMAP_THRESHOLD, NEVER)
        glibc("mallopt")(M_TRIM_THRESHOLD, NEVER)


def release_memory() -> None:
    """Gives back what is free, as after compiling and initialising."""
    glibc("malloc_trim")(0)


def start() -> None:
    """Readies this process to compute: it joins its job, if there is one, and keeps what it compiles.

    Raises:
      UserError: the job can't be joined.
    """
    processes.start()
    keep_programs()
    keep_memory()
