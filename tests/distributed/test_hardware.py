"""Memory of a step on CPUs, and the compiler options."""

import os
import platform
import resource
import subprocess
import sys
import types

import jax
import pytest
from conftest import ROOT

from vit_jax import config as configs
from vit_jax.distributed import hardware, runtime
from vit_jax.errors import UserError
from vit_jax.train.experiment import Experiment

CONFIG = ROOT / "configs/step.py"

# The first product is an array of 64 MiB, more than glibc keeps by default; each page from the
# kernel is a page fault. A step may still take new memory now and then, if a small block lies in
# the midst of the old memory: hence the median.
STEPS = """
import resource
import statistics
import jax
import jax.numpy as jnp
from vit_jax.distributed import runtime

runtime.keep_memory()
step = jax.jit(lambda x: x + (x @ x.T) @ x / 1e6)
x, faults = jnp.ones((4096, 8)), []
for _ in range(16):
    x = jax.block_until_ready(step(x))
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
runtime.release_memory()
print(statistics.median(b - a for a, b in zip(faults, faults[1:])), float(step(x).sum()) > 0)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_on_cpus_a_step_takes_no_new_memory():
    environment = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="")
    found = subprocess.run(
        [sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, check=True
    )
    pages, works = found.stdout.split()
    assert float(pages) < 100, "64 MiB are 16,384 pages"
    assert works == "True", "a step works after its memory was given back"


def test_without_glibc_nothing_is_called(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert runtime.glibc("mallopt")(runtime.M_TRIM_THRESHOLD, runtime.NEVER) == 0
    monkeypatch.setattr(sys, "platform", "linux")
    assert runtime.glibc("no_such_function")() == 0


def test_on_cpus_a_step_does_not_copy_the_moments_that_it_replaces():
    settings = ["image_size=32", "model.width=48", "model.depth=1", "data.batch_size=2"]
    config = configs.load(f"{CONFIG}:Ti/16", [f"--config.{setting}" for setting in settings])
    job = Experiment.on_devices(config, jax.devices()[:1])
    with jax.set_mesh(job.mesh):
        lowered = job.train_step.lower(job.abstract_state, job.abstract_batch)
        options = hardware.COMPILER_OPTIONS["cpu"]
        plain = lowered.compile(dict.fromkeys(options, False))
        ours = lowered.compile(dict.fromkeys(options, True))
        default = lowered.compile()
    copies = [
        compiled.as_text().count(" copy(%state_opt_state") for compiled in (plain, ours, default)
    ]
    assert copies[0] > 0 and copies[1:] == [0, 0]
    assert default.memory_analysis().temp_size_in_bytes < plain.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("kind", "platform"), [("cpu", "cpu"), ("TPU v5 lite", "tpu"), ("NVIDIA H100", "gpu")]
)
def test_an_abstract_device_of_an_older_jax_has_a_platform(kind, platform):
    device = types.SimpleNamespace(device_kind=kind, num_cores=1)
    assert hardware.described_platform(device) == platform


def test_free_memory_is_what_machine_container_and_ulimit_leave(tmp_path, monkeypatch):
    """The files of the kernel, in both versions of cgroups, written here."""
    monkeypatch.setattr(runtime, "PROC", tmp_path / "proc")
    roots = {
        name: (tmp_path / root.name, *names) for name, (root, *names) in runtime.CGROUPS.items()
    }
    monkeypatch.setattr(runtime, "CGROUPS", roots)
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: infinite)

    def write(name: str, text) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")

    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB")
    write("proc/self/status", "Name: python\nVmSize: 500 kB")
    assert runtime.free_memory() == 8000 * 1024
    write("proc/self/cgroup", "4:cpu,cpuacct:/a\n3:memory:/a/b\n0::/job.slice/of")
    write("cgroup/job.slice/of/memory.max", "max")
    write("cgroup/job.slice/of/memory.current", 900)
    assert runtime.free_memory() == 8000 * 1024
    write("cgroup/job.slice/memory.max", 7000)
    write("cgroup/job.slice/memory.current", 3000)
    write("cgroup/job.slice/memory.stat", "anon 2500\ninactive_file 500")
    assert runtime.free_memory() == 4500
    write("memory/a/b/memory.limit_in_bytes", 4000)
    write("memory/a/b/memory.usage_in_bytes", 1000)
    write("memory/a/b/memory.stat", "total_inactive_file 200")
    assert runtime.free_memory() == 3200
    monkeypatch.setattr(resource, "getrlimit", lambda _: (501 * 1024, 501 * 1024))
    assert runtime.free_memory() == 1024
    with pytest.raises(UserError, match=r"x declares 1\.0 GiB of arrays, more than the 0\.0"):
        runtime.check_fits(2**30, "x")
    runtime.check_fits(1024, "x")


@pytest.mark.parametrize("capability, is_fast", [("7.0", False), ("7.5", False), ("9.0", True)])
def test_gpus_before_ampere_have_no_fast_bfloat16(monkeypatch, capability, is_fast):
    client = types.SimpleNamespace(platform_version="PJRT C API\ncuda 12080")
    gpu = types.SimpleNamespace(client=client, compute_capability=capability)
    monkeypatch.setattr(hardware, "is_cpu", lambda: False)
    monkeypatch.setattr(hardware.jax, "local_devices", lambda: [gpu])
    assert hardware.has_fast_bfloat16() == is_fast


@pytest.mark.parametrize("usable", [{1}, {0, 2, 3}])
def test_a_record_has_the_cores_that_a_process_may_use(monkeypatch, usable):
    """XLA splits sums by cores, so a process that is bound to one of two has other bits."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: usable, raising=False)
    assert hardware.devices()["cores"] == len(usable)
