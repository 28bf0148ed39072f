"""Schedules and optimizers against trajectories of the published implementations."""

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from conftest import below, golden

from vit_jax import optim

_, SCHEDULES = golden("lr_schedules")
SUPPORTED = {"base", "decay_type", "total_steps", "warmup_steps", "linear_end", "cooldown_steps", "timescale",
             "batch_size", "data_size"}  # fmt: skip
CASES = [
    case
    for case in SCHEDULES["cases"]
    if set(case["kwargs"]) <= SUPPORTED and case["kwargs"]["decay_type"] in optim.SCHEDULES
]


def test_most_golden_schedules_are_covered():
    assert len(CASES) >= 9


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_schedules_equal_the_published_ones(case):
    arrays, _ = golden("lr_schedules")
    kwargs = case["kwargs"]
    published_end = 1e-5 if case["name"].startswith("vit_jax") else 0.0  # vision_transformer's default
    schedule = optim.make_schedule(
        kwargs["decay_type"],
        kwargs.get("base", 1.0),
        kwargs["total_steps"],
        kwargs.get("warmup_steps", 0),
        cooldown_steps=kwargs.get("cooldown_steps", 0),
        end_lr=kwargs.get("linear_end", published_end),
        timescale=kwargs.get("timescale", 10_000),
    )
    rates = [schedule(step) for step in arrays[f"{case['name']}/steps"]]
    np.testing.assert_allclose(rates, arrays[f"{case['name']}/lr"], rtol=1e-6, atol=1e-8)


def test_warm_up_starts_at_zero_and_cooldown_ends_there():
    schedule = optim.make_schedule("rsqrt", 1.0, 100, 10, cooldown_steps=20, timescale=50)
    assert schedule(0) == 0.0 and schedule(100) == 0.0
    np.testing.assert_allclose(schedule(60), 1 / np.sqrt(2), rtol=1e-6)


def test_a_run_may_end_inside_its_warm_up():
    schedule = optim.make_schedule("cosine", 1.0, 10, 40)
    np.testing.assert_allclose([schedule(step) for step in (0, 5, 10)], [0.0, 0.125, 0.25], rtol=1e-6)


def settings(**values):
    base = dict(name="adam", lr=0.01, schedule="cosine", warmup_steps=3, cooldown_steps=0, wd=0.0, wd_times_lr=True)
    base |= dict(wd_mask="kernel", grad_clip_norm=1.0, momentum_dtype="float32", b1=0.9, b2=0.999, momentum=0.9)
    return ml_collections.ConfigDict(base | values)


TRAJECTORIES = {
    "optim_bv_adam_bf16": (settings(wd=0.001, wd_times_lr=False, momentum_dtype="bfloat16"), 3e-5),
    "optim_vitjax_sgd_float32": (settings(name="sgd", lr=0.03), 1e-6),
    "optim_vitjax_sgd_bfloat16": (settings(name="sgd", lr=0.03, momentum_dtype="bfloat16"), 3e-5),
    # AdamW by learning rate times decay, with the same trajectory: big_vision's wd is ours times its learning rate.
    "optim_bv_adam_bf16 ": (settings(wd=0.1, momentum_dtype="bfloat16"), 3e-5),
}


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_updates_equal_the_published_trajectory(name):
    config, tolerance = TRAJECTORIES[name]
    common, _ = golden("optim_common")
    arrays, _ = golden(name.strip())
    params, grads, truth = below(common, "params0"), below(common, "grads"), below(arrays, "params")
    tx, _ = optim.make_optimizer(config, params, 20)

    @jax.jit
    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for step in range(10):
        params, state = update(params, state, {key: value[step] for key, value in grads.items()})
        for key, value in params.items():
            np.testing.assert_allclose(value, truth[key][step + 1], atol=tolerance, err_msg=f"{key} step {step}")


def test_decay_reaches_the_masked_parameters_only():
    params = {"a": {"kernel": jnp.ones(3), "bias": jnp.ones(3)}, "kernel_like": jnp.ones(3)}
    tx, _ = optim.make_optimizer(settings(wd=0.1, warmup_steps=0), params, 10)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_allclose(updates["a"]["kernel"], -0.01 * 0.1, rtol=1e-6)
    assert not updates["a"]["bias"].any() and not updates["kernel_like"].any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optim.make_schedule("stair", 1.0, 10), "unknown schedule 'stair': use one of cosine"),
        (lambda: optim.make_optimizer(settings(name="lion"), {}, 10), "unknown optimizer 'lion': use one of adam"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
