"""Schedules and optimizers against trajectories of the published implementations."""

import re

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from conftest import GOLDEN, below, build_experiment, golden, last_error, metric_lines

from vit_jax import config as configs
from vit_jax.checkpoints import read as checkpoint
from vit_jax.errors import UserError
from vit_jax.models import create
from vit_jax.train import __main__ as train
from vit_jax.train import optim, schedules, workdir
from vit_jax.train import state as states
from vit_jax.weights import scan_layout

SCHEDULES, SCHEDULE_CONFIG = golden("lr_schedules")
# Options of the published schedules by our names; the others are lengths in other units, see
# `ours`.
SAME = {"linear_end": "end_lr", "end": "end_lr"} | {
    key: key for key in ("power", "timescale", "shift")
}


def ours(case) -> dict:
    """Arguments of `make_schedule` for a published case: what is in epochs, examples or percent
    becomes steps.
    """
    kwargs = dict(case["kwargs"])
    batch, total, base = kwargs.pop("batch_size", 0), kwargs["total_steps"], kwargs.pop("base", 1.0)
    epoch = kwargs.pop("data_size", 0) / batch if batch else 0
    found = dict(name=kwargs.pop("decay_type"), total_steps=kwargs.pop("total_steps"))
    found["lr"] = base * (batch / 256 if kwargs.pop("scale_with_batchsize", False) else 1.0)
    if found["name"] == "linear" and case["name"].startswith("vit_jax"):
        found["end_lr"] = 1e-5  # vision_transformer's default
    if found["name"] == "stair":
        found["stairs"] = tuple(zip(kwargs.pop("steps"), kwargs.pop("mults"), strict=True))
    for name in list(kwargs):
        for unit, length in (
            ("_steps", 1),
            ("_epochs", epoch),
            ("_examples", 1 / batch if batch else 0),
        ):
            if name.endswith(unit):
                found[name.removesuffix(unit) + "_steps"] = round(kwargs.pop(name) * length)
        if name.endswith("_percent"):
            found[name.removesuffix("_percent") + "_steps"] = round(kwargs.pop(name) * total)
    return found | {SAME[name]: value for name, value in kwargs.items()}


@pytest.mark.parametrize("case", SCHEDULE_CONFIG["cases"], ids=lambda case: case["name"])
def test_schedules_equal_the_published_ones(case):
    schedule = schedules.make_schedule(**ours(case))
    rates = [schedule(step) for step in SCHEDULES[f"{case['name']}/steps"]]
    np.testing.assert_allclose(rates, SCHEDULES[f"{case['name']}/lr"], rtol=1e-6, atol=1e-8)


def test_published_schedules_cover_all_but_the_constant_one():
    assert {case["kwargs"]["decay_type"] for case in SCHEDULE_CONFIG["cases"]} == set(
        schedules.SCHEDULES
    ) - {"constant"}
    assert len(SCHEDULE_CONFIG["cases"]) == 14
    schedule = schedules.make_schedule("constant", 0.5, 100, 10, cooldown_steps=20)
    np.testing.assert_allclose(
        [schedule(step) for step in (0, 5, 10, 80, 90)], [0, 0.25, 0.5, 0.5, 0.25], rtol=1e-6
    )


def test_stairs_count_from_the_start_of_the_run_and_multiply_the_base():
    schedule = schedules.make_schedule("stair", 2.0, 100, 10, stairs=((20, 0.5), (60, 0.1)))
    rates = [schedule(step) for step in (5, 19, 20, 59, 60, 99)]
    np.testing.assert_allclose(rates, [1.0, 2.0, 1.0, 1.0, 0.2, 0.2], rtol=1e-6)


def test_warm_up_starts_at_zero_and_cooldown_ends_there():
    schedule = schedules.make_schedule("rsqrt", 1.0, 100, 10, cooldown_steps=20, timescale=50)
    assert schedule(0) == 0.0 and schedule(100) == 0.0
    np.testing.assert_allclose(schedule(60), 1 / np.sqrt(2), rtol=1e-6)


def test_a_run_may_end_inside_its_warm_up():
    schedule = schedules.make_schedule("cosine", 1.0, 10, 40)
    np.testing.assert_allclose(
        [schedule(step) for step in (0, 5, 10)], [0.0, 0.125, 0.25], rtol=1e-6
    )


def settings(**values):
    base = dict(lr=0.01, schedule="cosine", warmup_steps=3, grad_clip_norm=1.0)
    return ml_collections.ConfigDict(dict(configs.defaults().optim) | base | values)


BF16 = dict(momentum_dtype="bfloat16")
BIG_VISION = dict(wd_times_lr=False)
PLAIN = dict(grad_clip_norm=0.0, warmup_steps=0)
MULTS = dict(frozen="embedding/.*", lr_mults=(("head/.*", 3.0), (".*", 1.0)))
MULTS |= dict(wd_mults=((".*/kernel", 1.0), (".*/scale", 0.5)))

# Config of every published trajectory, and the tolerance: bfloat16 may round a tie to the other
# side.
TRAJECTORIES = {
    "optim_bv_adam_bf16": (settings(wd=0.001, **BIG_VISION, **BF16), 3e-5),
    "optim_bv_adam_f32_mults_frozen": (
        settings(
            lr=0.02, b2=0.95, wd=0.01, schedule="rsqrt", timescale=5, warmup_steps=2, cooldown_steps=4,
            **BIG_VISION, **MULTS,
        ),
        1e-6,
    ),
    "optim_bv_adafactor": (settings(name="adafactor", beta2_cap=0.95, wd=0.003, **BIG_VISION, **BF16), 3e-5),
    "optim_bv_adafactor_default_clip": (
        settings(name="adafactor", clipping_threshold=1.0, schedule="linear", end_lr=0.001, **PLAIN, **BF16),
        3e-5,
    ),
    "optim_bv_momentum_hp": (settings(name="sgd", lr=0.03, **BF16), 3e-5),
    "optim_bv_momentum_hp_nesterov": (
        settings(name="sgd", lr=0.03, momentum=0.8, nesterov=True, wd=0.01, **BIG_VISION, **PLAIN, **BF16),
        3e-5,
    ),
    "optim_bv_sgd": (settings(name="sgd", lr=0.1, momentum=0.0, **PLAIN), 1e-6),
    "optim_vitjax_sgd_float32": (settings(name="sgd", lr=0.03), 1e-6),
    "optim_vitjax_sgd_bfloat16": (settings(name="sgd", lr=0.03, **BF16), 3e-5),
    # AdamW by learning rate times decay, with the same trajectory: big_vision's wd is ours times
    # its learning rate.
    "optim_bv_adam_bf16 ": (settings(wd=0.1, **BF16), 3e-5),
}  # fmt: skip


def trajectory(config, params, grads):
    """Yields the parameters after every update."""
    tx, _ = optim.make_optimizer(config, params, 20)

    @jax.jit
    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for step in range(len(jax.tree.leaves(grads)[0])):
        params, state = update(
            params, state, jax.tree.map(lambda value, step=step: value[step], grads)
        )
        yield params


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_updates_equal_the_published_trajectory(name):
    config, tolerance = TRAJECTORIES[name]
    common, _ = golden("optim_common")
    arrays, _ = golden(name.strip())
    params, grads, truth = below(common, "params0"), below(common, "grads"), below(arrays, "params")
    for step, found in enumerate(trajectory(config, params, grads)):
        for key, value in found.items():
            np.testing.assert_allclose(
                value, truth[key][step + 1], atol=tolerance, err_msg=f"{key} step {step}"
            )


def test_every_published_trajectory_is_used():
    here = {path.stem for path in GOLDEN.glob("optim_*.npz")} - {"optim_common"}
    assert here == {name.strip() for name in TRAJECTORIES} and len(here) == 9


def test_adafactor_is_its_formula_without_factors():
    """arXiv 1804.04235 algorithm 4 for a vector, with the capped beta2 and an undebiased mean, in
    numpy.
    """
    config = settings(
        name="adafactor",
        beta2_cap=0.5,
        clipping_threshold=0.5,
        momentum=0.8,
        schedule="constant",
        **PLAIN,
    )
    grads = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    w, v, m = np.ones(4), np.zeros(4), np.zeros(4)
    for step, found in enumerate(trajectory(config, {"w": jnp.ones(4)}, {"w": grads})):
        beta2 = min(0.5, 1 - (step + 1.0) ** -0.8)
        v = beta2 * v + (1 - beta2) * grads[step] ** 2
        update = grads[step] / np.sqrt(v)
        m = 0.8 * m + 0.2 * update / max(1.0, np.sqrt(np.mean(update**2)) / 0.5)
        w = w - 0.01 * m
        np.testing.assert_allclose(found["w"], w, atol=1e-6)


def test_lars_is_that_of_mae():
    """golden/lars_mae: three steps of util/lars.py of facebookresearch/mae on random gradients of a
    kernel, a bias, and a kernel that starts at zero.
    """
    arrays, facts = golden("lars_mae")
    stairs = tuple((step, lr / 6.4) for step, lr in enumerate(facts["lr"]) if step)
    config = settings(
        name="lars", lr=6.4, wd=facts["weight_decay"], schedule="stair", stairs=stairs
    )
    config.update(warmup_steps=0, grad_clip_norm=0.0)
    truth = below(arrays, "params")
    found = trajectory(config, below(arrays, "start"), below(arrays, "grads"))
    for step, params in enumerate(found):
        for name, value in params.items():
            np.testing.assert_allclose(value, truth[name][step], rtol=1e-5, err_msg=name)


def test_lamb_is_optax_lamb_where_it_decays_and_adam_elsewhere():
    """The second half is apex's FusedLAMB, and the Lamb of timm 1.0.31."""
    rng = np.random.default_rng(0)
    params = {
        "a": {"kernel": rng.normal(size=(5, 4)), "bias": rng.normal(size=4)},
        "z": {"kernel": np.zeros((3, 2))},
    }
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    grads = jax.tree.map(
        lambda x: jnp.asarray(3 * rng.normal(size=(6, *x.shape)), jnp.float32), params
    )
    config = settings(name="lamb", eps=1e-6, wd=0.1, schedule="constant", warmup_steps=0)
    is_kernel = {"a": {"kernel": True, "bias": False}, "z": {"kernel": True}}
    labels = jax.tree.map(lambda kernel: "lamb" if kernel else "adam", is_kernel)
    peers = dict(lamb=optax.lamb(0.01, weight_decay=0.1), adam=optax.adam(0.01, eps=1e-6))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.partition(peers, labels))
    truth, state = params, tx.init(params)
    for step, found in enumerate(trajectory(config, params, grads)):
        updates, state = tx.update(jax.tree.map(lambda g, step=step: g[step], grads), state, truth)
        truth = optax.apply_updates(truth, updates)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, truth
        )


LAMB = {
    "kernels": dict(wd=0.1),
    "all": dict(wd=0.1, wd_mults=((".*", 1.0),)),
    "none": dict(wd=0.0),
    "mixed": dict(wd=0.1, wd_mults=(("a/kernel", 1.0), ("a/bias", 0.5)), grad_clip_norm=0.0),
}


@pytest.mark.parametrize("case", LAMB)
def test_lamb_is_that_of_timm_whatever_decays(case):
    """Six updates by the Lamb of timm 1.0.31, by which parameters decay; a kernel is zero."""
    arrays, _ = golden("lamb_timm")
    plain = dict(name="lamb", eps=1e-6, schedule="constant", warmup_steps=0)
    config = settings(**plain | LAMB[case])
    truth = below(arrays, case)
    steps = trajectory(config, below(arrays, "params0"), below(arrays, "grads"))
    for step, found in enumerate(steps):
        for key, value in found.items():
            np.testing.assert_allclose(value, truth[key][step], rtol=1e-5, atol=1e-6, err_msg=key)


def test_lamb_moves_a_kernel_by_lr_times_its_norm():
    """arXiv 1904.00962 algorithm 2: the first step of Adam is the sign of the gradient, and decay
    joins before the norm is taken."""
    kernel, grad = np.array([3.0, -4.0], np.float32), np.array([0.5, 0.25], np.float32)
    config = settings(
        name="lamb", wd=0.1, schedule="constant", warmup_steps=0, lr_mults=(("a/.*", 2.0),)
    )
    (found,) = trajectory(config, {"a": {"kernel": kernel}}, {"a": {"kernel": grad[None]}})
    direction = np.sign(grad) + 0.1 * kernel
    wanted = kernel - 2.0 * 0.01 * 5.0 * direction / np.linalg.norm(direction)
    np.testing.assert_allclose(found["a"]["kernel"], wanted, rtol=1e-6)


def test_lamb_is_the_same_for_stacked_layers():
    rng = np.random.default_rng(0)
    blocks = {f"encoderblock_{i}": {"kernel": rng.normal(size=(4, 3)) * 10.0**i} for i in range(3)}
    params = jax.tree.map(jnp.float32, {"Transformer": blocks})
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=(4, *x.shape)), jnp.float32), params)
    config = settings(name="lamb", wd=0.1, warmup_steps=0)
    stacked_grads = scan_layout.stack_blocks(grads, lambda leaves: jnp.stack(leaves, axis=1))
    looped = trajectory(config, params, grads)
    for one, other in zip(
        looped, trajectory(config, scan_layout.stack_blocks(params), stacked_grads), strict=True
    ):
        other = scan_layout.unstack_blocks(other)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), one, other)


def state_shapes(config, params) -> set[tuple[int, ...]]:
    tx, _ = optim.make_optimizer(config, params, 10)
    return {leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(tx.init, params))}


def test_optimizers_remember_no_more_than_they_need():
    params = {"a": {"kernel": jnp.ones((40, 48))}, "b": {"kernel": jnp.ones((31, 64))}}
    both = {(40, 48), (31, 64)}
    assert not state_shapes(settings(name="sgd", momentum=0.0), params) & both
    assert state_shapes(settings(name="sgd"), params) & both == both
    factored = state_shapes(settings(name="adafactor", momentum=0.0), params)
    assert {(40,), (48,), (31, 64)} <= factored and (40, 48) not in factored
    frozen = state_shapes(settings(frozen="a/.*"), params)
    assert (31, 64) in frozen and (40, 48) not in frozen


def test_frozen_parameters_stay_and_count_in_no_norm():
    params = {"a": {"kernel": jnp.ones(3)}, "b": {"kernel": jnp.ones(3)}}
    grads = {"a": {"kernel": jnp.full((1, 3), 100.0)}, "b": {"kernel": jnp.full((1, 3), 0.1)}}
    config = settings(
        name="sgd", momentum=0.0, frozen="a/.*", wd=0.5, schedule="constant", warmup_steps=0
    )
    (found,) = trajectory(config, params, grads)
    np.testing.assert_array_equal(found["a"]["kernel"], 1.0)
    np.testing.assert_allclose(
        found["b"]["kernel"], 1 - 0.01 * (0.1 + 0.5), rtol=1e-6
    )  # 0.1: nothing was clipped


@pytest.mark.parametrize("times_lr", [True, False])
def test_decay_goes_with_the_parameters_learning_rate_only_as_adamw(times_lr):
    params = {"a": {"kernel": jnp.ones(2)}, "b": {"kernel": jnp.ones(2)}}
    config = settings(
        wd=0.1,
        wd_times_lr=times_lr,
        lr_mults=(("a/.*", 0.5), (".*", 2.0)),
        schedule="constant",
        warmup_steps=0,
    )
    (found,) = trajectory(config, params, jax.tree.map(lambda x: jnp.zeros((1, *x.shape)), params))
    lost = {name: float(1 - leaf["kernel"][0]) for name, leaf in found.items()}
    wanted = dict(a=0.01 * 0.5 * 0.1, b=0.01 * 2.0 * 0.1) if times_lr else dict(a=0.1, b=0.1)
    assert lost == pytest.approx(wanted, rel=1e-3)


def test_layer_decay_leaves_the_heads_of_objectives_as_they_are():
    """But not a token that is put among the patches, as in DINOv2's code."""
    after = ("head", "dino_head", "ibot_head", "patch_head", "turns_head")
    params = {name: {"kernel": np.ones(2)} for name in after} | dict(mask=np.ones(2))
    scaled, _ = optim.scale_by_layer(0.5, 3).update(params, optax.EmptyState(), params)
    assert all((scaled[name]["kernel"] == 1).all() for name in after)
    assert (scaled["mask"] == 0.5**4).all()


@pytest.mark.parametrize(("times_lr", "rate"), [(True, 0.01), (False, 1.0)])
def test_decay_rises_by_half_a_cosine(times_lr, rate):
    """The schedule of weight decay of facebookresearch/dino: utils.cosine_scheduler."""
    config = settings(
        wd=0.04, wd_end=0.4, wd_times_lr=times_lr, schedule="constant", warmup_steps=0
    )
    params = {"a": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}}
    tx, _ = optim.make_optimizer(config, params, 8)
    state = tx.init(params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    for number in range(8):
        updates, state = tx.update(zeros, state, params)
        wd = 0.4 + 0.5 * (0.04 - 0.4) * (1 + np.cos(np.pi * number / 8))
        np.testing.assert_allclose(updates["a"]["kernel"], -rate * wd, rtol=1e-5)
        assert not updates["a"]["bias"].any()


def test_decay_reaches_the_masked_parameters_only():
    params = {"a": {"kernel": jnp.ones(3), "bias": jnp.ones(3)}, "kernel_like": jnp.ones(3)}
    tx, _ = optim.make_optimizer(settings(wd=0.1, warmup_steps=0), params, 10)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_allclose(updates["a"]["kernel"], -0.01 * 0.1, rtol=1e-6)
    assert not updates["a"]["bias"].any() and not updates["kernel_like"].any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: schedules.make_schedule("step", 1.0, 10),
            "unknown schedule 'step': use one of cosine",
        ),
        (
            lambda: optim.make_optimizer(settings(name="lion"), {}, 10),
            "unknown optimizer 'lion': use one of adam",
        ),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("key", ["lr_mults", "wd_mults", "frozen"])
@pytest.mark.parametrize("pattern", ["head", "a/.*x"])
def test_patterns_that_match_no_whole_path_are_named(key, pattern):
    value = pattern if key == "frozen" else ((pattern, 1.0),)
    params = {"a": {"kernel": jnp.ones(3)}, "head": {"kernel": jnp.ones(3)}}
    with pytest.raises(
        UserError, match=rf"config key optim.{key}: .* matches no parameter .* such as a/kernel"
    ):
        optim.make_optimizer(settings(wd=0.1, **{key: value}), params, 10)


def test_lars_needs_its_patterns_without_weight_decay():
    params = {"head": {"kernel": jnp.ones(3)}}
    with pytest.raises(UserError, match=r"optim.wd_mults: .* matches no parameter"):
        optim.make_optimizer(settings(name="lars", wd_mults=(("kernel", 1.0),)), params, 10)


def test_a_pattern_behind_one_that_takes_all_is_named():
    mults = ((".*", 1.0), ("head/.*", 3.0))
    with pytest.raises(
        UserError, match=r"lr_mults: 'head/\.\*' matches no parameter that the .* before it leave"
    ):
        optim.make_optimizer(settings(lr_mults=mults), {"head": {"kernel": jnp.ones(3)}}, 10)


ADAFACTOR = [
    "--config.optim.name=adafactor",
    "--config.optim.clipping_threshold=1",
    "--config.optim.wd=0.01",
]
ADAFACTOR += [
    "--config.optim.momentum_dtype=bfloat16",
    "--config.total_steps=6",
    "--config.optim.lr=0.01",
]


def run(tiny, workdir, *arguments) -> tuple[list[float], dict]:
    """Losses by step, and the flat parameters at the end."""
    assert train.main([f"--config={tiny}", f"--workdir={workdir}", *arguments]) == 0
    lines = [line["train/loss"] for line in metric_lines(workdir) if "train/loss" in line]
    return lines, scan_layout.flatten(checkpoint.read_params(checkpoint.find(workdir)))


MUON = ["--config.optim.name=muon", "--config.optim.wd=0.01", "--config.optim.lr=0.01"]
MUON += ["--config.total_steps=6"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [ADAFACTOR, MUON], ids=["adafactor", "muon"])
def test_training_is_alike_however_it_is_sharded_and_leaves_what_is_frozen(
    optimizer, tiny, tmp_path
):
    arguments = [*optimizer, "--config.optim.frozen=embedding/.*"]
    one, params = run(tiny, tmp_path / "one", *arguments)
    split, _ = run(
        tiny, tmp_path / "split", *arguments, "--config.mesh.fsdp=2", "--config.mesh.tensor=2"
    )
    np.testing.assert_allclose(split, one, rtol=1e-5)
    assert one[-1] < one[0]
    config = configs.load(tiny, arguments)
    start = scan_layout.flatten(build_experiment(config).objective.init(config.seed))
    still = {name for name in start if np.abs(start[name] - params[name]).max() < 1e-6}
    assert still == {"embedding/kernel", "embedding/bias"}


@pytest.mark.parametrize("scan", [False, True])
def test_every_array_of_adafactor_divides_over_its_devices(tiny, scan):
    arguments = [
        *ADAFACTOR,
        "--config.mesh.fsdp=2",
        "--config.mesh.tensor=4",
        "--config.model.width=128",
    ]
    config = configs.load(
        tiny, [*arguments, "--config.model.mlp_dim=512", f"--config.model.scan={scan}"]
    )
    state = build_experiment(config).abstract_state.opt_state
    split = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        leaf.sharding.shard_shape(leaf.shape)  # raises where it does not divide
        split[optim.path_name(path)] = any(leaf.sharding.spec)
    assert {name.split("/")[2] for name, is_split in split.items() if is_split} >= {"v", "ema"}
    placeholders = [name for name in split if name.endswith("Dense_0/bias") and "/v_row/" in name]
    assert placeholders and not any(split[name] for name in placeholders)


def test_a_pattern_that_matches_nothing_ends_training_in_one_line(tiny, tmp_path, capsys):
    assert (
        train.main(
            [f"--config={tiny}", f"--workdir={tmp_path}", "--config.optim.frozen=encoder/.*"]
        )
        == 2
    )
    assert "config key optim.frozen: 'encoder/.*' matches no parameter" in last_error(capsys)


PARTS = ["frozen=Transformer/encoderblock.*", "frozen=head/.*", "name=muon"]


@pytest.mark.parametrize("setting", PARTS)
def test_a_state_in_parts_changes_its_layout_and_back(tiny, setting):
    made = []
    for scan in (False, True):
        arguments = [f"--config.optim.{setting}", f"--config.model.scan={scan}"]
        made.append(states.fresh_state(build_experiment(configs.load(tiny, arguments))))
    looped, scanned = made
    there = scan_layout.relayout(states.as_dict(looped), True, jnp.stack)
    assert jax.tree.structure(there) == jax.tree.structure(states.as_dict(scanned))
    back = scan_layout.relayout(there, False, jnp.stack)
    assert jax.tree.structure(back) == jax.tree.structure(states.as_dict(looped))
    for one, other in zip(
        jax.tree.leaves(back), jax.tree.leaves(states.as_dict(looped)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_adafactor_resumes_in_the_same_layout_only(tiny, tmp_path):
    config = configs.load(tiny, ADAFACTOR)
    saved = configs.to_json(configs.load(tiny, [*ADAFACTOR, "--config.model.scan=true"]))
    assert workdir.differences(config, saved) == ["model.scan: True -> False"]
    saved = configs.to_json(configs.load(tiny, ["--config.model.scan=true"]))
    assert workdir.differences(configs.load(tiny), saved) == []


def test_early_stopping_keeps_what_it_counts_by(tiny, tmp_path):
    flags = ["--config.early_stopping=2", "--config.checkpoint.keep_best=eval/val/top1"]
    workdir.claim(tmp_path, configs.load(tiny, [*flags, "--config.checkpoint.every=2"]), "")
    workdir.check(tmp_path, configs.load(tiny, [*flags, "--config.checkpoint.every=2"]), "")
    with pytest.raises(UserError, match=r"\(checkpoint.every: 2 -> 4\)"):
        workdir.check(tmp_path, configs.load(tiny, [*flags, "--config.checkpoint.every=4"]), "")


TIMM_NAMES = {
    "cls": "cls_token",
    "Transformer/posembed_input/pos_embedding": "pos_embed",
    "embedding/kernel": "patch_embed.proj.weight",
    "Transformer/encoderblock_0/LayerNorm_0/scale": "blocks.0.norm1.weight",
    "Transformer/encoderblock_2/MlpBlock_3/Dense_1/kernel": "blocks.2.mlp.fc2.weight",
    "head/kernel": "head.weight",
}


def layered(scan: bool, decay: float):
    """The update of every parameter by gradients of 1 and a learning rate of 0.5, by name."""
    model = create.create("Ti/8", 5, 16, width=24, depth=3, mlp_dim=32, num_heads=2, scan=scan)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), create.abstract_params(model))
    plain = dict(
        name="sgd",
        momentum=0.0,
        nesterov=False,
        schedule="constant",
        warmup_steps=0,
        grad_clip_norm=0.0,
    )
    config = settings(**plain, lr=0.5, wd=0.0, layer_decay=decay)
    tx, _ = optim.make_optimizer(config, params, 10)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    return scan_layout.flatten(scan_layout.unstack_blocks(updates) if scan else updates)


@pytest.mark.parametrize("scan", [False, True])
def test_every_layer_has_its_share_of_the_learning_rate(scan):
    found = layered(scan, 0.5)
    shares = {
        name: set((-2.0 * np.asarray(update)).ravel().tolist()) for name, update in found.items()
    }
    for name, share in shares.items():
        block = re.search(r"encoderblock_(\d)", name)
        last = name.startswith(("head", "Transformer/encoder_norm"))
        layer = int(block[1]) + 1 if block else 4 if last else 0
        assert share == {0.5 ** (4 - layer)}, name
    assert shares["head/kernel"] == {1.0} and shares["embedding/kernel"] == {0.0625}
    assert {0.5, 0.25, 0.125} <= set.union(*shares.values())
    theirs = golden("layer_decay_timm")[1]["scales"]  # param_groups_layer_decay of timm 1.0.31
    for name, other in TIMM_NAMES.items():
        assert shares[name] == {theirs[other]}, name
    assert shares["Transformer/encoder_norm/scale"] == {1.0} and theirs["norm.weight"] == 0.5


def test_layers_are_needed_to_decay_by_layer():
    params = {"block1": {"kernel": jnp.ones(3)}}
    with pytest.raises(UserError, match=r"layer_decay=0.5 needs a model with encoder blocks"):
        optim.make_optimizer(
            settings(name="sgd", momentum=0.0, nesterov=False, layer_decay=0.5), params, 10
        )


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.1, 30.0])
def test_clipping_is_optaxs(size):
    updates = {
        "a": size * np.ones((3, 4), np.float32),
        "b": [-size * np.arange(5, dtype=np.float32)],
    }
    found, truth = (
        tx.update(updates, tx.init(updates))[0]
        for tx in (optim.clip_by_global_norm(0.7), optax.clip_by_global_norm(0.7))
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, truth)


def test_muon_is_that_of_torch():
    """golden/muon_torch: three updates of torch.optim.Muon with equal gradients, because optax
    corrects the bias of the momentum and torch does not; its Newton-Schulz steps in float32.
    """
    arrays, facts = golden("muon_torch")
    config = settings(
        name="muon", lr=facts["lr"], wd=facts["weight_decay"], momentum=facts["momentum"]
    )
    config.update(schedule="constant", **PLAIN)
    truth = below(arrays, "params")
    found = trajectory(config, below(arrays, "start"), below(arrays, "grads"))
    for step, params in enumerate(found):
        for name, value in params.items():
            np.testing.assert_allclose(value, truth[name][step], atol=1e-5, err_msg=name)


def quintic(matrix):
    """Muon's five steps on a matrix, by its singular values, in float64."""
    left, values, right = np.linalg.svd(matrix.astype(float), full_matrices=False)
    values = values / np.sqrt((values**2).sum())
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ np.diag(values) @ right


@pytest.mark.parametrize("scan", [False, True])
def test_muon_updates_the_matrices_of_blocks_and_adam_the_rest(scan):
    """Momentum as in Nadam, by hand. Layers stacked for scan have a matrix each."""
    rng = np.random.default_rng(0)
    kernel = "MultiHeadDotProductAttention_1/query/kernel"
    layers = [rng.normal(size=(3, 6, 2, 4)).astype(np.float32) for _ in range(2)]
    grads = {f"Transformer/encoderblock_{i}/{kernel}": layer for i, layer in enumerate(layers)}
    if scan:
        grads = {f"Transformer/encoderblock/{kernel}": np.stack(layers, 1)}
    others = {"Transformer/encoderblock_0/LayerNorm_0/scale": (6,), "head/kernel": (6, 3)}
    others = {name: rng.normal(size=(3, *shape)) for name, shape in others.items()}
    params = {name: jnp.zeros(grad.shape[1:]) for name, grad in (grads | others).items()}
    config = settings(name="muon", momentum=0.8, schedule="constant", **PLAIN)
    found = list(trajectory(config, params, grads | others))[-1]

    alone = settings(name="adam", schedule="constant", **PLAIN)
    rest = {name: params[name] for name in others}
    for name, value in list(trajectory(alone, rest, others))[-1].items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)

    matrices = {name: found[name] for name in grads}
    if scan:
        (stacked,) = matrices.values()
        matrices = dict(enumerate(stacked))
    for value, layer in zip(matrices.values(), layers, strict=True):
        truth, momentum = np.zeros((6, 8)), np.zeros((6, 8))
        for step, grad in enumerate(layer.reshape(3, 6, 8), 1):
            momentum = 0.8 * momentum + 0.2 * grad
            ahead = 0.8 * momentum / (1 - 0.8 ** (step + 1)) + 0.2 * grad / (1 - 0.8**step)
            truth -= 0.01 * 0.2 * np.sqrt(8) * quintic(ahead)
        np.testing.assert_allclose(value.reshape(6, 8), truth, atol=1e-5)


def test_muon_needs_encoder_blocks():
    params = dict(head=dict(kernel=jnp.zeros((6, 3))))
    with pytest.raises(UserError, match=r"optim\.name=muon needs a model with encoder blocks"):
        optim.make_optimizer(settings(name="muon"), params, 20)


def test_a_length_that_no_counter_holds_is_an_error():
    config = ml_collections.ConfigDict(
        dict(total_steps=0, total_epochs=1e9, data=dict(batch_size=16))
    )
    with pytest.raises(UserError, match=r"is 67312500000 steps: give at most 2147483647 steps"):
        schedules.plan_steps(config, 1077)
