"""What the process is told of its memory."""

import os
import platform
import subprocess
import sys

import pytest

from vit_jax import chips

# Sorting makes two temporary arrays of 16 MiB; each page that the kernel gives is counted as a fault.
STEPS = """
import resource
import jax
import jax.numpy as jnp
from vit_jax import chips

chips.keep_memory()
step = jax.jit(lambda x: x + jnp.sort(x @ x.T, axis=0).sum())
x, faults = jnp.ones((2048, 8)), []
for _ in range(8):
    x = jax.block_until_ready(step(x))
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
chips.release_memory()
print(max(b - a for a, b in zip(faults[3:], faults[4:])), float(step(x).sum()) > 0)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc")
def test_on_cpus_a_step_takes_no_new_memory():
    environment = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="")
    found = subprocess.run([sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, check=True)
    pages, works = found.stdout.split()
    assert int(pages) < 100, "16 MiB are 4,096 pages"
    assert works == "True", "memory that was given back is had again"


def test_without_glibc_nothing_is_told(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert chips.glibc("mallopt")(chips.M_TRIM_THRESHOLD, chips.NEVER) == 0
    monkeypatch.setattr(sys, "platform", "linux")
    assert chips.glibc("no_such_function")() == 0
