"""Facts about accelerators."""

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


def peak_flops(device_kind: str) -> float | None:
    """bf16 FLOP/s of one device, or None for a kind that is not listed (such as a CPU)."""
    return PEAK_FLOPS.get(device_kind)
