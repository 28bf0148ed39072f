"""Facts about accelerators."""

import dataclasses

# Dense bf16 peak in FLOP/s per JAX device, by `device_kind`. Sources: Google Cloud TPU system architecture pages (a v3
# chip is two devices), NVIDIA data sheets without sparsity.
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
# tpu: without the threshold, sharded parameters of 16 and more shards are gathered in as many pieces as there are
# shards, each with a matrix product too small for the chip: an MLP of 8 layers over fsdp=16 on v5e:4x4 takes 145.9
# Mcycles by the compiler's estimate, and 23.4 with it (v6e:4x4: 73.6 and 8.8; no change on v4 and v5p).
COMPILER_OPTIONS = {"tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}}


@dataclasses.dataclass(frozen=True)
class Tpu:
    """What a plan must know of a chip. Bandwidths in bytes/s.

    Sources: Google Cloud's TPU system architecture pages (peak, HBM, network); "How to scale your model" (Google
    DeepMind, 2025) for one direction of a link and 25 GB/s of data-center network per host; `hbm_gib` is what the
    compiler says is usable; `clock` is inferred from the peak and the width of the matrix units.
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


def compiler_options(platform: str) -> dict[str, str]:
    """What the training step is compiled with on a platform of JAX."""
    return COMPILER_OPTIONS.get(platform, {})
