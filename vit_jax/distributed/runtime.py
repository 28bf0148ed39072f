"""How a process uses this machine: the cache folder, the programs kept in it, and memory."""

import atexit
import contextlib
import ctypes
import gc
import os
import pathlib
import tempfile

import jax

from vit_jax.distributed import hardware, processes
from vit_jax.errors import UserError

# If one of them is set, it decides about compiled programs.
JAX_VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")

# Parameters of glibc's mallopt, and the value that turns both off.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
NEVER = -1


def folder() -> pathlib.Path:
    """The user's cache folder, for what took long to find out or to compile. It may be deleted at
    any time.

    It is $VIT_JAX_CACHE, else vit_jax in $XDG_CACHE_HOME, else ~/.cache/vit_jax.
    """
    given = os.environ.get("VIT_JAX_CACHE")
    if given and "://" in given:
        raise UserError(
            f"VIT_JAX_CACHE={given} is not a local folder: choose one, and share compiled programs "
            "by JAX_COMPILATION_CACHE_DIR, which may be on a store"
        )
    if given:
        return pathlib.Path(given)
    if os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(os.environ["XDG_CACHE_HOME"]) / "vit_jax"
    try:
        return pathlib.Path.home() / ".cache/vit_jax"
    except RuntimeError:  # a user without a home, as in some containers
        return pathlib.Path(tempfile.gettempdir()) / "vit_jax"


def keep_programs() -> None:
    """Keeps compiled programs in the cache folder, so that a later process does not compile them
    again.
    """
    if not any(name in os.environ for name in JAX_VARIABLES):
        jax.config.update("jax_compilation_cache_dir", str(folder() / "programs"))


@contextlib.contextmanager
def without_collections():
    """Turns off Python's cyclic garbage collector. Tracing makes many objects that stay, and each
    collection would visit all of them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def check_fits(num_bytes: int, what) -> None:
    """Raises UserError if `what` declares more bytes than this machine has."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > machine:
        raise UserError(
            f"{what} declares {num_bytes / 2**30:,.1f} GiB of arrays, more than the "
            f"{machine / 2**30:,.1f} GiB of memory here: it is damaged or not what it should be; "
            "choose another, or a larger machine"
        )


def keep_memory() -> None:
    """Lets a step on CPUs reuse the memory of the step before. Call it before JAX has devices.

    XLA allocates the memory of each step anew, and glibc gives large blocks back to the kernel,
    which clears every page again: 547 MiB in a step of Ti/16 with 16 images, a sixth of its time.
    So glibc keeps them, in the heap of the main thread, because the heaps of other threads hold at
    most 64 MiB. And the main thread computes a step before it starts the next one, because a step
    that is dispatched ahead holds its memory from then on.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if hardware.is_cpu():
        glibc("mallopt")(M_MMAP_THRESHOLD, NEVER)
        glibc("mallopt")(M_TRIM_THRESHOLD, NEVER)


def release_memory() -> None:
    """Gives free memory back to the kernel, such as after compiling and initialising."""
    glibc("malloc_trim")(0)


def glibc(name: str):
    """A function of glibc, or one that does nothing if there is no glibc."""

    def nothing(*_) -> int:
        return 0

    if not hardware.is_linux():
        return nothing
    return getattr(ctypes.CDLL(None), name, nothing)


def start() -> None:
    """Prepares this process to compute: joins its job, if there is one, and sets up the caches."""
    atexit.register(gc.freeze)  # Python would search TensorFlow's objects for garbage: a second
    processes.start()
    keep_programs()
    keep_memory()
