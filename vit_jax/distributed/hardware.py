"""What depends on the platform: facts about accelerators, compiler options, and ways to compute."""

import dataclasses
import os
import pathlib
import sys

import jax

# Dense bf16 peak in FLOP/s per JAX device, by `device_kind`. Sources: Google Cloud TPU system
# architecture pages (a v3 chip is two devices), NVIDIA data sheets without sparsity.
PEAK_FLOPS = {
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}

# Compiler options of the training step, by platform.
#
# tpu: without the threshold, parameters in 16 and more shards are gathered in as many pieces, each
# followed by a matrix product that is too small for the chip: an MLP of 8 layers over fsdp=16 on
# v5e:4x4 takes 145.9 Mcycles by the compiler's estimate, and 23.4 with it (v6e:4x4: 73.6 and 8.8;
# no change on v4 and v5p).
#
# cpu: without region analysis, a step copies the optimizer's moments before it overwrites them, in
# case the old ones are still read; with it, they are read first. B/16 with 4 images takes 2 to 4 %
# less time, and 636 MiB besides the state instead of 902.
COMPILER_OPTIONS = {
    "tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
    "cpu": {"xla_cpu_copy_insertion_use_region_analysis": True},
}


# Further ones, by device kind.
#
# v5e, v5p: with 32 MiB of on-chip memory for an operation instead of 16, products that dropout
# precedes are tiled as without it: four layers of L/16 with dropout take 40.1 Mcycles instead of
# 41.7 (v5e, 64 images) and 44.1 instead of 46.3 (v5p, 128 images). v6e has 32 MiB by default.
LARGER_OPERATIONS = {"xla_tpu_scoped_vmem_limit_kib": "32768"}
OPTIONS_OF_KIND = dict.fromkeys(("TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p"), LARGER_OPERATIONS)


# On-chip memory (VMEM) that a kernel may take, by device kind: v4 has no more than the compiler's
# default, newer chips have 128 MiB.
KERNEL_BYTES = {"TPU v4": 16 * 2**20}
MOST_KERNEL_BYTES = 32 * 2**20


@dataclasses.dataclass(frozen=True)
class Tpu:
    """What a plan must know about a chip. Bandwidths are in bytes/s.

    Sources: Google Cloud's TPU system architecture pages (peak, HBM, network); "How to scale your
    model" (Google DeepMind, 2025) for one direction of a link and 25 GB/s of data-center network
    per host; `hbm_gib` is what the compiler can use; `clock` is derived from the peak and the width
    of the matrix units.
    """

    device_kind: str
    hbm_gib: float
    hbm_bandwidth: float
    clock: float  # Hz
    link_bandwidth: float  # of one interconnect link in one direction
    torus: int  # number of dimensions of the interconnect
    wraps: int  # a side whose length is a multiple of this has wraparound links
    host_chips: int  # chips per host, in a pod of several hosts
    host_cores: int  # virtual CPUs of such a host

    @property
    def peak_flops(self) -> float:
        return PEAK_FLOPS[self.device_kind]

    @property
    def network_bandwidth(self) -> float:
        """Bandwidth of the data-center network per chip."""
        return 25e9 / self.host_chips


TPUS = {
    "v4": Tpu("TPU v4", 30.75, 1228e9, 1.049e9, 45e9, 3, 4, 4, 240),
    "v5e": Tpu("TPU v5 lite", 15.75, 819e9, 1.503e9, 45e9, 2, 16, 4, 112),
    "v5p": Tpu("TPU v5", 95.73, 2765e9, 1.751e9, 90e9, 3, 4, 4, 208),
    "v6e": Tpu("TPU v6 lite", 31.24, 1640e9, 1.751e9, 90e9, 2, 16, 4, 180),
}


def peak_flops(device_kind: str) -> float | None:
    """Peak bf16 FLOP/s of one device; None for a kind that is not listed, such as a CPU."""
    return PEAK_FLOPS.get(device_kind)


def is_cpu() -> bool:
    """Whether this process computes on CPUs by default."""
    return jax.default_backend() == "cpu"


def has_fast_bfloat16() -> bool:
    """Whether products of bfloat16 matrices are faster than those of float32: on accelerators, but
    for NVIDIA's before Ampere, and on CPUs with instructions for them, as far as Linux says so.
    """
    if not is_cpu():
        device = jax.local_devices()[0]
        return not is_cuda(device) or is_ampere_or_later(device)
    try:
        flags = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def devices() -> dict[str, object]:
    """What a run computes on, for its records: two with the same give the same bits."""
    found = dict(kind=jax.devices()[0].device_kind, count=jax.device_count())
    found["processes"] = jax.process_count()
    if is_cpu():
        found |= dict(cpu=cpu_name(), cores=cores())
    return found


def cores() -> int:
    """The number of cores that this process may use; in a container fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cpu_name() -> str:
    """Such as "AMD EPYC, family 25, model 17"; "" if Linux does not say it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    facts = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    if "model name" not in facts:
        return ""
    return f"{facts['model name']}, family {facts.get('cpu family')}, model {facts.get('model')}"


def is_linux() -> bool:
    return sys.platform == "linux"


def product_side() -> int:
    """The side of two square matrices whose product, when timed, reaches the peak FLOP/s."""
    return 2048 if is_cpu() else 8192


def slice_index(device) -> int:
    """The TPU slice of a device; 0 elsewhere, where JAX's `slice_index` numbers hosts."""
    if device.platform != "tpu":
        return 0
    return getattr(device, "slice_index", 0)


def compiler_options(mesh: jax.sharding.Mesh) -> dict[str, str | bool]:
    """Compiler options of the training step for the devices of a mesh."""
    device = mesh.devices.flat[0]
    common = COMPILER_OPTIONS.get(device.platform, {})
    return common | OPTIONS_OF_KIND.get(device.device_kind, {})


def described_platform(device) -> str:
    """The platform of a mesh's abstract device; before JAX 0.10.1 it has only a kind."""
    if hasattr(device, "platform"):
        return device.platform
    if device.device_kind.startswith("TPU"):
        return "tpu"
    return "cpu" if device.device_kind == "cpu" else "gpu"


def platform() -> str:
    """Where the program will run: "tpu", "cpu", "cuda" (a GPU with cuDNN's fused attention), or
    another of JAX's names.

    The current mesh decides. Its devices may be described only, such as those of a TPU topology
    for which a CPU compiles. Without a mesh it is JAX's default.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = described_platform(device) if device else jax.default_backend()
    if name == "gpu" and has_cudnn(jax.local_devices()[0]):
        return "cuda"
    return name


def kernel_bytes() -> int:
    """On-chip memory that a kernel may take on the TPU where the program will run."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return KERNEL_BYTES.get(device.device_kind, MOST_KERNEL_BYTES)


def has_cudnn(device) -> bool:
    """Whether a GPU runs cuDNN's fused attention: NVIDIA's, from Ampere on."""
    return is_cuda(device) and is_ampere_or_later(device)


def is_cuda(device) -> bool:
    return "cuda" in device.client.platform_version


def is_ampere_or_later(device) -> bool:
    """Whether one of NVIDIA's GPUs is of a generation with bfloat16."""
    return float(device.compute_capability) >= 8.0


def multiply_on_tpu(multiply, otherwise, *arrays):
    """Calls one of two functions with the same result: on TPUs the one that uses matrix products,
    because indexing and sums over rows are slow there.
    """
    return jax.lax.platform_dependent(*arrays, tpu=multiply, default=otherwise)


def branch_or_select(branch, select, *arrays):
    """Calls one of two functions with the same result: on CPUs the one that computes only the
    chosen branch, elsewhere the one that computes all of them and selects.
    """
    return jax.lax.platform_dependent(*arrays, cpu=branch, default=select)
