"""Facts about accelerators, and what JAX and the process are told about them."""

import dataclasses

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

# By platform: options of the compiler for the training step.
#
# tpu: without the threshold, sharded parameters of 16 and more shards are gathered in as many
# pieces as there are shards, each with a matrix product too small for the chip: an MLP of 8 layers
# over fsdp=16 on v5e:4x4 takes 145.9 Mcycles by the compiler's estimate, and 23.4 with it (v6e:4x4:
# 73.6 and 8.8; no change on v4 and v5p).
#
# cpu: without it a step copies the optimizer's moments, as new ones take their place while
# something may still read the old; with it those are read first. B/16 with 4 images takes 2 to 4 %
# less time, and 636 MiB beside the state, not 902.
COMPILER_OPTIONS = {
    "tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
    "cpu": {"xla_cpu_copy_insertion_use_region_analysis": True},
}


@dataclasses.dataclass(frozen=True)
class Tpu:
    """What a plan must know of a chip. Bandwidths in bytes/s.

    Sources: Google Cloud's TPU system architecture pages (peak, HBM, network); "How to scale your
    model" (Google DeepMind, 2025) for one direction of a link and 25 GB/s of data-center network
    per host; `hbm_gib` is what the compiler says is usable; `clock` is inferred from the peak and
    the width of the matrix units.
    """

    device_kind: str
    hbm_gib: float
    hbm_bandwidth: float
    clock: float  # Hz
    link_bandwidth: float  # of one interconnect link in one direction
    torus: int  # dimensions of the interconnect
    wraps: int  # an extent that is a multiple of this has wraparound links
    host_chips: int  # of a host in a pod of several
    host_cores: int  # virtual CPUs of that host

    @property
    def peak_flops(self) -> float:
        return PEAK_FLOPS[self.device_kind]

    @property
    def network_bandwidth(self) -> float:
        """Of the data-center network, per chip."""
        return 25e9 / self.host_chips


TPUS = {
    "v4": Tpu("TPU v4", 30.75, 1228e9, 1.049e9, 45e9, 3, 4, 4, 240),
    "v5e": Tpu("TPU v5 lite", 15.75, 819e9, 1.503e9, 45e9, 2, 16, 4, 112),
    "v5p": Tpu("TPU v5", 95.73, 2765e9, 1.751e9, 90e9, 3, 4, 4, 208),
    "v6e": Tpu("TPU v6 lite", 31.24, 1640e9, 1.751e9, 90e9, 2, 16, 4, 180),
}


def peak_flops(device_kind: str) -> float | None:
    """bf16 FLOP/s of one device, or None for a kind that is not listed (such as a CPU)."""
    return PEAK_FLOPS.get(device_kind)


def product_side() -> int:
    """Of the square matrices whose product, measured, stands for the peak of the matrix units."""
    return 2048 if jax.default_backend() == "cpu" else 8192


def slice_index(device) -> int:
    """The slice of a TPU pod that a device belongs to; elsewhere JAX counts hosts by that name, and
    there is one.
    """
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def multiply_or_index(multiply, index, *arrays):
    """What both functions compute: on TPUs, where each index costs, by the one that is made of
    matrix products.
    """
    return jax.lax.platform_dependent(*arrays, tpu=multiply, default=index)


def branch_or_select(branch, select, *arrays):
    """What both functions compute: on CPUs by the one that does what is chosen alone, else by the
    one that does all.
    """
    return jax.lax.platform_dependent(*arrays, cpu=branch, default=select)


def compiler_options(mesh: jax.sharding.Mesh) -> dict[str, str | bool]:
    """What the training step is compiled with for the devices of a mesh."""
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].platform, {})


def described_platform(device) -> str:
    """The platform of a mesh's abstract device; before JAX 0.10.1 it has only a kind."""
    if hasattr(device, "platform"):
        return device.platform
    if device.device_kind.startswith("TPU"):
        return "tpu"
    return "cpu" if device.device_kind == "cpu" else "gpu"


def platform() -> str:
    """Where the program will run: "tpu", "cpu", "cuda" with cuDNN's fused attention, or another
    name of JAX's.

    The mesh that is set says it, also one of devices that are only described, for which a CPU
    compiles; without a mesh it is JAX's default.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = described_platform(device) if device else jax.default_backend()
    return "cuda" if name == "gpu" and has_cudnn(jax.local_devices()[0]) else name


def has_cudnn(device) -> bool:
    """Whether a GPU runs cuDNN's fused attention: NVIDIA's, from Ampere on."""
    return "cuda" in device.client.platform_version and float(device.compute_capability) >= 8.0
