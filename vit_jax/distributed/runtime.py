"""How a process uses this machine: the cache folder, the programs kept in it, and memory."""

import atexit
import contextlib
import ctypes
import gc
import os
import pathlib
import resource
import tempfile

import jax

from vit_jax.cli import regular
from vit_jax.distributed import hardware, processes
from vit_jax.errors import UserError

# If one of them is set, it decides about compiled programs.
JAX_VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")

# A small run fails with 20 and works with 30; threads that read, other processes of a job, and
# stores need more.
OPEN_FILES = 256

# Parameters of glibc's mallopt, and the value that turns both off.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
NEVER = -1

PROC = pathlib.Path("/proc")
SYSTEM = pathlib.Path("/sys/fs/cgroup")
# Controllers in /proc/self/cgroup -> root of the folders, and the names there of limit, usage, and
# the files in the cache, which the kernel can take back: version 2, and version 1.
CGROUPS = {
    "": (SYSTEM, "memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        SYSTEM / "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


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
        regular.check_folder(folder() / "programs")
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


def free_memory() -> int:
    """Bytes that this process can still take: of the machine, of its container, and of `ulimit
    -v`.
    """
    return max(min([free_of_machine(), *free_of_containers(), *free_addresses()]), 0)


def sizes(path: pathlib.Path) -> dict[str, int]:
    """Name -> bytes of a file of the kernel with lines such as "VmSize: 12 kB"; {} without it."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return {}
    rows = [row for row in rows if len(row) > 1 and row[1].isdigit()]
    return {name.rstrip(":"): int(size) * (1024 if unit else 1) for name, size, *unit in rows}


def free_of_machine() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sizes(PROC / "meminfo").get("MemAvailable", total)


def free_of_containers() -> list[int]:
    """What each cgroup of this process and each one above it leaves."""
    found = []
    with contextlib.suppress(OSError):
        for line in (PROC / "self/cgroup").read_text().splitlines():
            controllers, path = line.split(":", 2)[1:]
            if controllers in CGROUPS:
                root, *names = CGROUPS[controllers]
                folder = root / path.strip("/")
                found += [free_of_cgroup(each, *names) for each in (folder, *folder.parents)]
    return [free for free in found if free is not None]


def free_of_cgroup(folder: pathlib.Path, limit: str, usage: str, cached: tuple) -> int | None:
    """None if there is no limit."""
    try:
        left = int((folder / limit).read_text()) - int((folder / usage).read_text())
    except (OSError, ValueError):  # no such cgroup, or the limit "max"
        return None
    found = sizes(folder / "memory.stat")
    return left + sum(found.get(name, 0) for name in cached)


def free_addresses() -> list[int]:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return []
    return [limit - sizes(PROC / "self/status").get("VmSize", 0)]


DAMAGED = "free some, or choose a larger machine; or it is damaged, and another is needed"

SMALLER = "choose a smaller model, or a larger machine"


def check_fits(num_bytes: int, what, do: str = DAMAGED) -> None:
    """Raises UserError if `what` declares more bytes than are free here; `do`: what to do then."""
    free = free_memory()
    if num_bytes > free:
        raise UserError(
            f"{what} declares {num_bytes / 2**30:,.1f} GiB of arrays, more than the "
            f"{free / 2**30:,.1f} GiB of memory that are free here: {do}"
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


def check_open_files() -> None:
    """Raises UserError if this process may open too few files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < OPEN_FILES:
        raise UserError(
            f"this process may open {limit} files, fewer than the {OPEN_FILES} that it may need: "
            f"raise the limit with ulimit -n {OPEN_FILES}"
        )


def start() -> None:
    """Prepares this process to compute: joins its job, if there is one, and sets up the caches."""
    check_open_files()
    atexit.register(gc.freeze)  # Python would search TensorFlow's objects for garbage: a second
    processes.start()
    keep_programs()
    keep_memory()
