"""Which code runs: versions of the packages that make the numbers, the commit, and a digest of our
own files.
"""

import functools
import hashlib
import importlib.metadata
import pathlib
import platform
import subprocess

FOLDER = pathlib.Path(__file__).parent.parent  # of the package
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
    """Of Python and of those packages that are installed."""
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
    folder = FOLDER.parent
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git
        return ""


@functools.cache
def code() -> str:
    """SHA-256 of our Python files: it also tells two trees apart that are not committed, or no
    checkout at all.
    """
    digest = hashlib.sha256()
    for path in sorted(FOLDER.rglob("*.py")):
        digest.update(
            path.relative_to(FOLDER).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    return digest.hexdigest()[:16]
