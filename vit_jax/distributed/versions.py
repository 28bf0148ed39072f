"""Which code runs: versions of packages that affect results, the commit, a digest of our files."""

import functools
import hashlib
import importlib.metadata
import pathlib
import platform
import subprocess

PACKAGE = pathlib.Path(__file__).parent.parent
PACKAGES = (
    "vit_jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "tensorflow-cpu",
    "tensorflow",
)


def versions() -> dict[str, str]:
    """Versions of Python and of those `PACKAGES` that are installed."""
    found = dict(python=platform.python_version())
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def commit() -> str:
    """The git commit of the code, or "" outside of a checkout."""
    command = ["git", "-C", str(PACKAGE.parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git
        return ""


@functools.cache
def code() -> str:
    """SHA-256 of our Python files. Unlike the commit it sees changes that are not committed, and
    works outside of a checkout.
    """
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
