"""What plans assume of the kernels of attention, which the TPU compiler does not count."""

import types

import pytest

from vit_jax import config as configs
from vit_jax.distributed import hardware
from vit_jax.plan import cost_model, figures, hlo
from vit_jax.train.objectives.objective import Stack

V5E = hardware.TPUS["v5e"]
LAYOUT = "{2,1,0:T(8,128)(2,1)}"
ARRAY = f"bf16[64,197,1024]{LAYOUT}"
CALL = 'custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/short_attention_64"}'
PROGRAM = f"""HloModule step, is_scheduled=true

ENTRY %main (q: {ARRAY}, k: {ARRAY}, v: {ARRAY}, g: {ARRAY}) -> {ARRAY} {{
  %q = {ARRAY} parameter(0)
  %k = {ARRAY} parameter(1)
  %v = {ARRAY} parameter(2)
  %g = {ARRAY} parameter(3)
  %y = {ARRAY} custom-call(%q, %k, %v), {CALL}
  ROOT %d = ({ARRAY}, {ARRAY}, {ARRAY}) custom-call(%q, %k, %v, %g), {CALL}
}}
"""


def stack(length: int, heads: int, width: int) -> Stack:
    return Stack(depth=2, length=length, width=width, num_heads=heads)


def settings(*overrides: str):
    return configs.load(
        "configs/pretrain.py:L/16,imagenet2012", [f"--config.{x}" for x in overrides]
    )


def ways(config, *stacks: Stack, tensor: int = 1) -> list[str]:
    return [cost_model.way_of_attention(config, one, dict(tensor=tensor)) for one in stacks]


def test_short_attention_takes_its_products_and_its_bundles():
    experiment = types.SimpleNamespace(chip=V5E)
    roofline, estimate = figures.kernel_ms(hlo.Program(PROGRAM), experiment)
    products = (2 + 5) * 2 * 64 * 16 * 197 * 197 * 64
    assert roofline == pytest.approx(1e3 * products / 197e12)
    # The compiler schedules 4,479 and 10,507 bundles for the 16 heads of an image.
    assert estimate == pytest.approx(1e3 * 64 * (4479 + 10507) / V5E.clock, rel=0.01)


def test_the_kernels_of_wide_heads_take_as_many_bundles_as_scheduled():
    """Of H/14: 16 heads of 80 channels, 257 tokens; 6,398 and 13,550 bundles for half of them."""
    text = PROGRAM.replace("197,1024", "257,1280").replace(
        "short_attention_64", "short_attention_80"
    )
    experiment = types.SimpleNamespace(chip=V5E)
    _, estimate = figures.kernel_ms(hlo.Program(text), experiment)
    assert estimate == pytest.approx(1e3 * 64 * 2 * (6398 + 13550) / V5E.clock, rel=0.1)


def test_a_program_without_kernels_takes_nothing_for_them():
    program = hlo.Program(PROGRAM.replace("tpu_custom_call", "Sharding"))
    assert figures.kernel_ms(program, types.SimpleNamespace(chip=V5E)) == (0, 0)


def test_plans_choose_attention_as_training_does():
    """By length, dtype, position embedding, and the heads of each device."""
    short, long = stack(197, 16, 1024), stack(785, 16, 1024)
    config = settings("model.dtype=bfloat16")
    assert ways(config, short, long, stack(197, 0, 1024)) == ["short", "splash", ""]
    assert ways(settings("model.posemb=relative"), short) == ["einsum"]
    assert ways(settings("model.attention=einsum"), long) == ["einsum"]
    odd = stack(600, 4, 320)
    assert ways(config, odd) == ["splash"] and ways(config, odd, tensor=2) == ["short"]


def test_compiler_options_are_those_of_the_kind_of_chip():
    def options(kind: str) -> dict:
        device = types.SimpleNamespace(platform="tpu", device_kind=kind)
        devices = types.SimpleNamespace(flat=[device])
        return hardware.compiler_options(types.SimpleNamespace(devices=devices))

    common = hardware.COMPILER_OPTIONS["tpu"]
    assert options("TPU v4") == common
    assert options("TPU v5 lite") == common | {"xla_tpu_scoped_vmem_limit_kib": "32768"}
