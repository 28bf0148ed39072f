"""SwiGLU in the encoder, against numpy and on a mesh; the pooling that DINOv2's classifiers read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import applied

import vit_jax
from vit_jax.distributed import hardware, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.models import create, flops, mlp
from vit_jax.models.mae import MaskedAutoencoder
from vit_jax.models.ops import activation
from vit_jax.weights import scan_layout

SIZES = dict(width=32, depth=2, mlp_dim=48, num_heads=2, patch_size=8, image_size=16)
GATED = dict(SIZES, mlp="swiglu", layer_scale=0.5, registers=2, num_classes=3, head_std=0.5)


@pytest.fixture(scope="module")
def drawn():
    """(model, random parameters, images)."""
    model = vit_jax.create_model(None, **GATED)
    image = jax.random.normal(jax.random.key(1), (4, *model.image_size, 3))
    params = jax.jit(model.init)(jax.random.key(0), image)["params"]
    return model, params, image


def test_swiglu_equals_numpy():
    block = mlp.MlpBlock(mlp_dim=24, kind="swiglu")
    x = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)
    params = jax.tree.map(
        lambda leaf: np.random.default_rng(leaf.size).normal(size=leaf.shape).astype(np.float32),
        block.init(jax.random.key(0), x)["params"],
    )
    layers = {name: (p["kernel"].astype(float), p["bias"]) for name, p in params.items()}
    assert layers.keys() == {"gate", "Dense_0", "Dense_1"}
    gate = x @ layers["gate"][0] + layers["gate"][1]
    hidden = gate / (1 + np.exp(-gate)) * (x @ layers["Dense_0"][0] + layers["Dense_0"][1])
    truth = hidden @ layers["Dense_1"][0] + layers["Dense_1"][1]
    np.testing.assert_allclose(applied(block, params, x), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", mlp.GELUS)
def test_on_gpus_a_gelu_keeps_its_input_only_and_its_gradient_is_rounded_once(kind, monkeypatch):
    monkeypatch.setattr(hardware, "platform", lambda: "cuda")
    x = jnp.linspace(-4, 4, 512, dtype=jnp.bfloat16)
    y, pull = jax.vjp(lambda x: activation.activate(mlp.GELUS[kind], x, jnp.bfloat16), x)
    (kept,) = jax.tree.leaves(pull)
    assert kept.dtype == jnp.bfloat16 and (kept == x).all()
    assert (y == mlp.GELUS[kind](x)).all()
    truth = jax.vmap(jax.grad(mlp.GELUS[kind]))(x.astype(jnp.float32))
    np.testing.assert_array_equal(pull(jnp.ones_like(y))[0], truth.astype(jnp.bfloat16))


def test_scan_and_remat_change_no_number_of_a_gated_model(drawn):
    model, params, image = drawn
    other = model.clone(scan=True, remat="names", remat_names=("hidden",))
    stacked = scan_layout.relayout(params, True, jnp.stack)

    def loss(params, model):
        return (model.apply({"params": params}, image) ** 2).mean()

    with_gradients = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    value, grads = with_gradients(params, model)
    other_value, other_grads = with_gradients(stacked, other)
    assert value > 0.01 and abs(value - other_value) <= 1e-6
    other_grads = scan_layout.flatten(scan_layout.relayout(other_grads, False, jnp.stack))
    for name, wanted in scan_layout.flatten(grads).items():
        np.testing.assert_allclose(other_grads[name], wanted, atol=1e-5, err_msg=name)


def test_tensor_parallelism_splits_the_gate_too(drawn):
    model, params, image = drawn
    truth = applied(model, params, image)
    mesh = meshes.make_mesh(dict(replica=1, data=4, fsdp=1, tensor=2))
    specs = sharding.param_specs(params, mesh)
    block = scan_layout.flatten(specs["Transformer"]["encoderblock_0"])
    for leaf in ("kernel", "bias"):
        gate = block[f"MlpBlock_3/gate/{leaf}"]
        assert gate == block[f"MlpBlock_3/Dense_0/{leaf}"] and "tensor" in gate.spec
    with jax.set_mesh(mesh):
        found = applied(model, jax.device_put(params, specs), image)
    np.testing.assert_allclose(found, truth, atol=1e-5)


def test_pooling_of_the_class_token_and_the_mean(drawn):
    model, params, image = drawn
    model = model.clone(num_classes=0, pool="tok_gap")
    both = applied(model, params, image)
    assert both.shape == (4, 64)
    token = applied(model.clone(pool="tok"), params, image)
    mean = applied(model.clone(pool="gap", class_token=True), params, image)
    np.testing.assert_allclose(both, np.concatenate([token, mean], axis=1), atol=1e-6)
    head = create.abstract_params(model.clone(num_classes=3))["head"]["kernel"]
    assert head.shape == (64, 3)


def test_flops_count_the_gate_and_the_wider_head(drawn):
    model = drawn[0].clone(pool="tok_gap")
    params = {"params": create.abstract_params(model)}
    image = jax.ShapeDtypeStruct((1, *model.image_size, 3), np.float32)
    assert model.flops == flops.count_flops(model.apply, params, image)
    vit = model.clone(pool="tok", num_classes=0, registers=0, mlp="gelu")
    plain, gated = (
        MaskedAutoencoder.build(vit.clone(mlp=kind), dict(width=16, depth=1, num_heads=2)).flops
        for kind in mlp.MLPS
    )
    num_tokens = 1 + 1  # 75 % of four patches are hidden
    assert gated - plain == model.depth * 2 * num_tokens * model.width * model.mlp_dim


def test_the_largest_model_of_dinov2_has_a_name():
    model = vit_jax.create_model("giant2/14", num_classes=0, image_size=518, layer_scale=1e-5)
    count = sum(
        leaf.size for leaf in jax.tree.leaves(create.abstract_params(model.with_scan(True)))
    )
    assert count == 1_136_479_232  # timm's vit_giant_patch14_dinov2
    assert model.mlp == "swiglu"
    assert vit_jax.create_model("B/16").mlp == "gelu"
