"""Where a run starts: a branch goes on from another run's whole state; only finite states are kept."""

import json
import math

import jax.numpy as jnp
import optax
import pytest
from conftest import metric_lines
from test_train import final_params, last_error, run, same_bits

from vit_jax import config as configs
from vit_jax.checkpoints import read as checkpoint
from vit_jax.train import state as states
from vit_jax.train import step, workdir

RSQRT = [
    "--config.optim.schedule=rsqrt",
    "--config.optim.timescale=4",
    "--config.evals.val.every=0",
]
COOLDOWN = "--config.optim.cooldown_steps=4"
KEEP = "--config.checkpoint.keep_every=4"


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    """(config file, workdir) of a run without an end in its schedule."""
    from conftest import TINY

    folder = tmp_path_factory.mktemp("trunk")
    (folder / "tiny.py").write_text(TINY)
    assert (
        run(
            str(folder / "tiny.py"), folder / "run", *RSQRT, KEEP, "--config.checkpoint.keep_last=1"
        )
        == 0
    )
    return str(folder / "tiny.py"), folder / "run"


@pytest.mark.slow
def test_a_branch_is_the_run_that_had_its_schedule_from_the_start(trunk, tmp_path):
    """The trunk's learning rate is that of a run with a cooldown until this begins: from there on
    all bits agree.
    """
    tiny, workdir = trunk
    point = workdir / "checkpoints/8"
    assert run(tiny, tmp_path / "planned", *RSQRT, COOLDOWN) == 0
    assert run(tiny, tmp_path / "branch", *RSQRT, COOLDOWN, f"--config.branch_from={point}") == 0
    planned, branch = metric_lines(tmp_path / "planned"), metric_lines(tmp_path / "branch")
    assert [line["step"] for line in branch] == [9, 10, 11, 12]
    for key in ("train/loss", "train/lr", "train/grad_norm"):
        assert [line[key] for line in branch] == [line[key] for line in planned[8:]], key
    assert same_bits(final_params(tmp_path / "planned"), final_params(tmp_path / "branch"))
    assert not same_bits(final_params(workdir), final_params(tmp_path / "branch"))
    assert f"branches from {point}" in (tmp_path / "branch/log.txt").read_text()


@pytest.mark.slow
def test_a_branch_is_continued_from_its_own_checkpoints(trunk, tmp_path):
    tiny, workdir = trunk
    branch = [*RSQRT, COOLDOWN, f"--config.branch_from={workdir}/checkpoints/4"]
    assert run(tiny, tmp_path / "branch", *branch) == 0
    for folder in sorted((tmp_path / "branch/checkpoints").iterdir())[1:]:
        folder.rename(tmp_path / folder.name)
    before = final_params(tmp_path / "branch")
    assert run(tiny, tmp_path / "branch", *branch) == 0
    log = (tmp_path / "branch/log.txt").read_text()
    assert log.count("branches from") == 1
    assert [line["step"] for line in metric_lines(tmp_path / "branch")] == list(range(5, 13))
    assert before and not (tmp_path / "branch/checkpoints/damaged_12").exists()


@pytest.mark.slow
def test_a_branch_may_have_another_layer_layout_and_mesh(trunk, tmp_path):
    tiny, workdir = trunk
    other = ["--config.model.scan=True", "--config.mesh.data=2", "--config.mesh.fsdp=4"]
    assert (
        run(tiny, tmp_path / "b", *RSQRT, *other, f"--config.branch_from={workdir}/checkpoints/8")
        == 0
    )
    losses = [
        [line["train/loss"] for line in metric_lines(folder)[-4:]]
        for folder in (workdir, tmp_path / "b")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


REFUSED = {
    "the end": (
        ["--config.total_steps=8"],
        "is a checkpoint of step 8, but this run ends at step 8",
    ),
    "another model": (
        ["--config.model.depth=3"],
        r"is of a run with another state (model.depth: 2 -> 3)",
    ),
    "another optimizer": (
        ["--config.optim.name=sgd"],
        "is of a run with another state (optim.momentum: (unset) -> 0.9",
    ),
    "averaging": (["--config.optim.ema_decay=0.9"], "(optim.ema_decay: 0.0 -> 0.9)"),
    "both": (["--config.init_from=x"], "are both set: a run starts from one of them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_branched_from_is_told_in_one_line(case, trunk, tmp_path, capsys):
    tiny, workdir = trunk
    arguments, message = REFUSED[case]
    from_there = f"--config.branch_from={workdir}/checkpoints/8"
    assert run(tiny, tmp_path / "b", "--config.evals.val.every=0", *arguments, from_there) == 2
    assert message in last_error(capsys)
    assert not (tmp_path / "b/config.json").exists()


def test_weights_alone_and_nothing_at_all_are_no_branching_points(trunk, tmp_path, capsys):
    tiny, workdir = trunk
    meta = checkpoint.read_meta(workdir / "checkpoints/8")
    checkpoint.write_params(
        tmp_path / "weights", {"x": jnp.ones(3)}, {k: meta[k] for k in ("config", "model")}
    )
    wrong = {tmp_path / "weights": "has only weights", tmp_path / "none": "holds no checkpoint"}
    wrong[workdir] = f"is not a checkpoint: give one by its step, such as {workdir}/checkpoints/12"
    for path, message in wrong.items():
        assert run(tiny, tmp_path / "b", f"--config.branch_from={path}") == 2
        assert message in last_error(capsys)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_state_is_finite_or_not(bad):
    made = step.create_state({"a": jnp.ones(4), "b": jnp.zeros((2, 2))}, optax.adam(1e-3), 0.9)
    assert states.is_finite(made)
    for field in ("params", "ema_params"):
        changed = dict(vars(made)[field], b=jnp.array([[0.0, bad], [0.0, 0.0]]))
        assert not states.is_finite(step.TrainState(**(vars(made) | {field: changed})))


def test_facts_of_a_checkpoint_hold_its_step_and_evaluation(trunk):
    meta = checkpoint.read_meta(trunk[1] / "checkpoints/12")
    assert meta["step"] == 12 and set(meta["metrics"]) == {
        "eval/val/top1",
        "eval/val/loss",
        "eval/val/count",
    }
    assert json.loads(json.dumps(meta)) == meta


def test_a_run_from_before_a_key_is_continued_with_its_default(tiny):
    flags = ["--config.data.randaug_layers=2"]
    config = configs.load(tiny, flags)
    saved = config.to_dict()
    del saved["data"]["randaug_ops"], saved["model"]["weight_init"]
    assert workdir.differences(config, saved) == []
    other = configs.load(tiny, [*flags, "--config.model.weight_init=timm"])
    assert workdir.differences(other, saved) == ["model.weight_init: (unset) -> 'timm'"]
