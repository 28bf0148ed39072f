"""Keeps what libraries print about themselves out of the output of commands."""

import contextlib
import importlib.abc
import importlib.util
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator

from vit_jax import errors

PCI = pathlib.Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"  # the PCI vendor of TPUs,
OTHERS = ("0x0042", "0x001f")  # and of its network cards and disks
# Without a TPU, libtpu must not look for one: it would ask a server and print what it misses. The
# accelerator type is needed, but not used.
NO_TPU = dict(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
)
# Lines of information and warnings of absl's C++, the latter in both of its forms.
CHATTER = re.compile(r"[IW]\d{4} \d|\d{4}-\d\d-\d\d [\d:.]+: [IW] |WARNING: All log messages")
ANOTHER = re.compile(r"[EF]\d{4} \d|\d{4}-\d\d-\d\d [\d:.]+: [EF] |\S+(Error|Warning): |Traceback")


def has_tpu(devices: pathlib.Path = PCI) -> bool:
    """Whether this machine has a TPU, of a known or a new kind."""
    for folder in devices.glob("*"):
        with contextlib.suppress(OSError):
            vendor = (folder / "vendor").read_text().strip()
            device = (folder / "device").read_text().strip()
            if vendor == GOOGLE and device not in OTHERS:
                return True
    return False


def begin() -> None:
    """Call it before JAX has devices, and before TensorFlow is imported."""
    if not has_tpu():
        for name, value in NO_TPU.items():
            os.environ.setdefault(name, value)
    if "tensorflow" not in sys.modules and not any(isinstance(x, Finder) for x in sys.meta_path):
        sys.meta_path.insert(0, Finder())


class Finder(importlib.abc.MetaPathFinder):
    """Imports TensorFlow without what its C++ logs at its import, and without Keras.

    TF_ENABLE_ONEDNN_OPTS=0 would turn that off, but also oneDNN's allocator, without which the
    pipeline takes 7 % more core time.
    """

    is_asked = False  # by itself

    def find_spec(self, name, path, target=None):
        if name != "tensorflow" or self.is_asked:
            return None
        self.is_asked = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_asked = False
        if spec is None:
            return None
        run = spec.loader.exec_module

        def run_quietly(module) -> None:
            with without_chatter(), without_keras():
                run(module)

        spec.loader.exec_module = run_quietly
        return spec


@contextlib.contextmanager
def without_keras() -> Iterator[None]:
    """Inside, TensorFlow is imported without loading Keras, which takes a third of the import.
    `tf.keras` still works: it is loaded when it is first used.
    """
    name = "TF_USE_LEGACY_KERAS"  # then TensorFlow tries to load tf_keras, another package
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


@contextlib.contextmanager
def without_chatter() -> Iterator[None]:
    """Holds back what is written to file descriptor 2, and then passes on all but chatter.

    `errors.say` still reaches the terminal, for a signal may end the process meanwhile.
    """
    with contextlib.ExitStack() as stack:
        try:
            held_back = stack.enter_context(tempfile.TemporaryFile())
        except OSError:  # no room: the chatter is shown
            yield
            return
        errors.terminal = os.dup(2)
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(errors.terminal, 2)
            os.close(errors.terminal)
            errors.terminal = 2
            held_back.seek(0)
            os.write(2, without_lines_of_libraries(held_back.read()))


def without_lines_of_libraries(text: bytes) -> bytes:
    """Text without chatter and the lines that continue it."""
    kept = []
    is_chatter = False
    for line in text.decode(errors="surrogateescape").splitlines(keepends=True):
        if CHATTER.match(line):
            is_chatter = True
        elif not is_chatter or ANOTHER.match(line):
            is_chatter = False
            kept.append(line)
    return "".join(kept).encode(errors="surrogateescape")
