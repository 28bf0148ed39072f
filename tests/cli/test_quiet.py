"""Commands do not show what libraries print about themselves, and lose nothing else."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from vit_jax.cli import quiet

CHATTER = """WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795578405.879234   12499 port.cc:153] oneDNN custom operations are on.
To enable the following instructions: AVX2
2026-11-25 03:43:22.123456: I tensorflow/core/util/port.cc:153] oneDNN
"""
OTHERS = """E0000 00:00:1795578405.879234   12499 main.cc:1] this is an error
of two lines
ImportError: libsomething.so is missing
"""


def test_lines_of_libraries_are_dropped_and_others_kept():
    found = quiet.without_lines_of_libraries((CHATTER + OTHERS + CHATTER).encode())
    assert found.decode() == OTHERS
    raw = b"caf\xe9 is not UTF-8\n"
    assert quiet.without_lines_of_libraries(raw) == raw


PROGRAM = """
import importlib.util, os, sys
from vit_jax import errors
from vit_jax.cli import quiet
quiet.begin()
importlib.util.find_spec("tensorflow")  # as some libraries ask
try:
    import tensorflow
except ImportError as error:
    print("failed:", error, file=sys.stderr)
os.write(2, b"afterwards\\n")
"""


def test_the_import_of_tensorflow_is_quiet_but_for_errors_and_what_we_say(tmp_path):
    lines = [*CHATTER.splitlines(), *OTHERS.splitlines()]
    fake = f"import os\nfrom vit_jax import errors\nfor line in {lines}:\n"
    fake += "    os.write(2, (line + chr(10)).encode())\nerrors.say('stopped by Ctrl-C')\n"
    fake += "raise ImportError('no AVX')\n"
    (tmp_path / "tensorflow.py").write_text(fake)
    variables = os.environ | dict(PYTHONPATH=f"{tmp_path}:{ROOT}")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, check=True
    )
    assert done.stderr == f"stopped by Ctrl-C\n{OTHERS}failed: no AVX\nafterwards\n"


def test_libtpu_looks_for_a_tpu_only_if_there_is_one(tmp_path, monkeypatch):
    def add(vendor: str, device: str) -> None:
        folder = tmp_path / f"0000:00:0{len(list(tmp_path.iterdir()))}.0"
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")

    add("0x8086", "0x0063")
    add(quiet.GOOGLE, "0x0042")  # gVNIC, the network card of virtual machines
    assert not quiet.has_tpu(tmp_path) and not quiet.has_tpu(tmp_path / "none")
    add(quiet.GOOGLE, "0x0063")
    assert quiet.has_tpu(tmp_path)
    monkeypatch.setenv("TPU_WORKER_ID", "3")
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    monkeypatch.setattr(quiet, "has_tpu", lambda: True)
    quiet.begin()
    assert "TPU_ACCELERATOR_TYPE" not in os.environ
    monkeypatch.setattr(quiet, "has_tpu", lambda: False)
    quiet.begin()
    assert os.environ["TPU_ACCELERATOR_TYPE"] and os.environ["TPU_WORKER_ID"] == "3"


WITHOUT_KERAS = """
import os, sys
from vit_jax.cli import quiet
quiet.begin()
import tensorflow as tf
assert "keras" not in sys.modules and "TF_USE_LEGACY_KERAS" not in os.environ
print(tf.keras.layers.Dense(3)(tf.ones((1, 2))).shape)
"""


@pytest.mark.slow
def test_tensorflow_loads_keras_when_it_is_used():
    command = [sys.executable, "-c", WITHOUT_KERAS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "(1, 3)\n", done.stderr
