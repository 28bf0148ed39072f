"""Distillation: the published loss, a teacher of another architecture and size in the step, and runs
that load, check and record it.
"""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
from conftest import TINY, applied, build_experiment, golden, last_error, metric_lines
from test_train import final_params, run, same_bits

import vit_jax
from vit_jax import config as configs
from vit_jax.checkpoints import read as checkpoint
from vit_jax.data import to_device
from vit_jax.data.augment import mix
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models import create, losses
from vit_jax.models.classifier import normalize
from vit_jax.plan import figures
from vit_jax.plan.compilation import Compiled
from vit_jax.train import state as states
from vit_jax.train import teacher as teachers
from vit_jax.train.experiment import Experiment
from vit_jax.train.objectives import distill
from vit_jax.train.teacher import Teacher
from vit_jax.train.timer import ProfilerWindow
from vit_jax.weights import load

FLAGS = ["--config.objective=distill", "--config.model.distilled=True", "--config.model.pool=tok"]
BATCH = 16


# --- the loss ---


def test_the_loss_is_that_of_deit():
    """Their `DistillationLoss` with timm's soft target cross-entropy, on random logits and labels.

    Its soft part is a mean over examples and classes, so it is 1 / classes of equation 2.
    """
    arrays, config = golden("deit_distillation")
    inputs = [arrays[name] for name in ("logits", "dist_logits", "teacher_logits", "label")]
    classes = inputs[0].shape[1]
    for theirs, (kind, weight, temperature) in zip(arrays["losses"], config["cases"], strict=True):
        alone = [float(distill.loss(*inputs, kind, part, temperature)) for part in (0.0, 1.0)]
        if kind == "soft":
            alone[1] /= classes
        ours = (1 - weight) * alone[0] + weight * alone[1]
        assert ours == pytest.approx(theirs, rel=1e-6)
        whole = float(distill.loss(*inputs, kind, weight, temperature))
        assert (whole == pytest.approx(theirs, rel=1e-6)) == (kind == "hard")


def test_the_defaults_are_equation_3_and_soft_is_equation_2():
    rng = np.random.default_rng(1)
    logits, dist, teacher = rng.normal(0, 2, (3, 5, 4))
    label = np.eye(4)[rng.integers(0, 4, 5)]
    xent = -(label * scipy.special.log_softmax(logits, 1)).sum(1).mean()
    chosen = -scipy.special.log_softmax(dist, 1)[np.arange(5), teacher.argmax(1)].mean()
    found = distill.loss(logits, dist, teacher, label)
    assert float(found) == pytest.approx((xent + chosen) / 2, rel=1e-6)
    p, q = scipy.special.softmax(teacher / 3, 1), scipy.special.softmax(dist / 3, 1)
    divergence = (p * np.log(p / q)).sum(1).mean()
    found = distill.loss(logits, dist, teacher, label, kind="soft", weight=0.1)
    assert float(found) == pytest.approx(0.9 * xent + 0.1 * 9 * divergence, rel=1e-6)


# --- the step ---


def small_teacher(image_size=12, num_classes=10, **fields) -> Teacher:
    """A ResNet of one bottleneck with a random head."""
    fields = dict(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), head_std=0.1) | fields
    sizes = dict(architecture="bit", units=(1,), width_factor=0.5)
    model = create.create(None, num_classes, image_size, **sizes, **fields)
    image = jnp.zeros((1, *model.image_size, 3))
    params = jax.device_get(jax.jit(model.init)(jax.random.key(1), image)["params"])
    return Teacher(model, params)


def make(tiny: str, *arguments: str, teacher=None, devices: int = 1) -> Experiment:
    flags = [*FLAGS, f"--config.data.batch_size={BATCH}", "--config.data.flip=False"]
    flags += ["--config.model.depth=1", *arguments]
    config = configs.load(tiny, flags)
    mesh = meshes.make_mesh(config.mesh, jax.devices()[:devices])
    return build_experiment(config, mesh=mesh, teacher=teacher or small_teacher())


def batch_of(seed=0) -> dict:
    rng = np.random.default_rng(seed)
    return dict(
        image=rng.integers(0, 256, (BATCH, 8, 8, 3)).astype(np.uint8),
        label=rng.integers(0, 10, BATCH).astype(np.int32),
        mask=np.array([1, 0] + [1] * (BATCH - 2), np.float32),
        seed=rng.integers(0, 2**31 - 1, (BATCH, 2)).astype(np.int32),
    )


def steps(experiment: Experiment, count: int = 2):
    """(metrics by step, parameters) of the first updates."""
    mesh = experiment.mesh
    rows = sharding.local_rows(mesh, BATCH)
    found = []
    with jax.set_mesh(mesh):
        state = states.fresh_state(experiment)
        for number in range(count):
            batch = to_device.global_batch(batch_of(number), mesh, rows, BATCH)
            state, metrics = experiment.train_step(state, batch)
            found.append(jax.device_get(metrics))
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(state.teacher), experiment.teacher.params
    )
    return found, jax.device_get(state.params)


# Logits are zero at the start, so after one update biases show what each head has learned from.
SGD = ["--config.optim.name=sgd", "--config.optim.momentum=0", "--config.optim.lr=1"]
SGD += ["--config.optim.warmup_steps=0", "--config.optim.grad_clip_norm=0"]
SGD += ["--config.optim.schedule=constant"]


def bias_after(target, mask):
    """After one update: a step towards the mean target from a probability of 0.1 each."""
    return (np.asarray(mask)[:, None] / mask.sum() * (target - 0.1)).sum(0)


@pytest.mark.parametrize("distilled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_heads_learn_from_smoothed_labels_and_from_the_teacher_of_the_mixed_image(
    distilled, tiny
):
    flags = [*SGD, "--config.mixup=0.5", "--config.label_smoothing=0.1"]
    experiment = make(tiny, *flags, f"--config.model.distilled={distilled}")
    found, params = steps(experiment, 1)
    batch = batch_of()
    mix_key, _ = jax.random.split(jax.random.fold_in(jax.random.key(0), 0))
    label = 0.9 * np.eye(10)[batch["label"]] + 0.01
    image, label, mask = mix.mix_batch(
        mix_key, normalize(batch["image"]), label, batch["mask"], 0.5, 0.0
    )
    teacher = experiment.teacher
    seen = jax.image.resize(image * 0.5 + 0.5, (BATCH, 12, 12, 3), "bilinear")
    seen = (seen - np.array(teacher.model.mean)) / np.array(teacher.model.std)
    said = np.asarray(applied(teacher.model, teacher.params, seen.astype(np.float32))).argmax(1)
    assert len(set(said)) > 1
    from_label = 0.5 * bias_after(np.asarray(label), mask)
    from_teacher = 0.5 * bias_after(np.eye(10)[said], mask)
    if distilled:
        np.testing.assert_allclose(params["head"]["bias"], from_label, atol=1e-6)
        np.testing.assert_allclose(params["head_dist"]["bias"], from_teacher, atol=1e-6)
    else:
        np.testing.assert_allclose(params["head"]["bias"], from_label + from_teacher, atol=1e-6)
        assert "head_dist" not in params
    assert found[0]["train/loss"] == pytest.approx(np.log(10), rel=1e-5)


def test_a_student_may_be_another_architecture_than_a_vit():
    model = create.create("R50x1", 10, 32, units=(1,), width_factor=0.5)
    teacher = small_teacher().model
    objective = distill.Distill(model, teacher, losses.softmax_xent, distill.hard, 0.5, 1)
    batch = dict(image=jnp.zeros((2, 32, 32, 3)), label=jnp.eye(2, 10), taught=jnp.eye(2, 10))
    params = create.abstract_params(model)
    loss, _ = jax.eval_shape(objective.loss, params, batch, jax.random.key(0), 0)
    assert loss.shape == (2,)


def test_a_teacher_of_the_students_size_sees_the_same_numbers(tiny):
    teacher = small_teacher(8, mean=(0.5,) * 3, std=(0.5,) * 3)
    objective = make(tiny, teacher=teacher).objective
    image = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    assert np.array_equal(objective.see(image), image)


WAYS = {
    "microbatches": (1, "--config.accum_steps=4"),
    "8 devices": (8, "--config.mesh.fsdp=2 --config.mesh.tensor=2 --config.mesh.zero=True"),
}


@pytest.mark.slow
def test_microbatches_and_devices_give_the_same_numbers(tiny):
    common = ["--config.mixup=0.3", "--config.distill.kind=soft", "--config.model.scan=True"]
    common += ["--config.distill.teacher_every=2"]
    metrics, params = steps(make(tiny, *common), 3)
    for way, (devices, flags) in WAYS.items():
        others, theirs = steps(make(tiny, *common, *flags.split(), devices=devices), 3)
        for one, two in zip(metrics, others, strict=True):
            for name in ("train/loss", "train/grad_norm", "train/agreement"):
                np.testing.assert_allclose(one[name], two[name], rtol=2e-5, err_msg=way)
        kernels = (tree["head_dist"]["kernel"] for tree in (params, theirs))
        np.testing.assert_allclose(*kernels, atol=1e-5, err_msg=way)


def test_between_its_answers_the_teacher_costs_nothing_and_labels_teach_alone(tiny, monkeypatch):
    seen = []
    see = distill.Distill.see

    def watched(self, image):
        jax.debug.callback(lambda: seen.append(len(seen)))
        return see(self, image)

    monkeypatch.setattr(distill.Distill, "see", watched)
    every = make(tiny, *SGD, "--config.distill.teacher_every=3")
    metrics, params = steps(every, 1)
    batch = batch_of()
    expected = bias_after(np.eye(10)[batch["label"]], batch["mask"])
    np.testing.assert_allclose(params["head"]["bias"], expected, atol=1e-6)
    assert not params["head_dist"]["bias"].any()
    metrics, _ = steps(every, 4)
    jax.effects_barrier()
    assert len(seen) == 1
    assert [np.isnan(one["train/agreement"]) for one in metrics] == [True, True, False, True]
    flops = 3 * every.model.flops + every.teacher.model.flops // 3
    assert every.objective.train_flops == flops


def test_what_a_hard_teacher_says_is_a_label_for_any_loss(tiny):
    """Labels and teacher have the same loss; softmaxes are compared only if they are trained."""
    rng = np.random.default_rng(0)
    logits, teacher = rng.normal(size=(2, 6, 10)).astype(np.float32)
    objective = make(tiny, "--config.loss=sigmoid_xent").objective
    target = np.eye(10)[teacher.argmax(1)]
    expected = optax.sigmoid_binary_cross_entropy(logits, target).sum(1)
    np.testing.assert_allclose(objective.teacher_loss(logits, teacher), expected, rtol=1e-6)
    with pytest.raises(UserError, match=r"distill\.kind=soft compares softmaxes, which loss=sig"):
        make(tiny, "--config.loss=sigmoid_xent", "--config.distill.kind=soft")


def test_the_teacher_computes_in_the_dtype_of_the_student_and_counts_in_a_plan(tiny):
    experiment = make(tiny, "--config.mesh.fsdp=2", devices=2)
    hbm = figures.hbm_gib(experiment, Compiled(0.0, 0, 2**30, None))
    kinds = ("params", "opt_state", "activations", "batch", "teacher")
    assert hbm["total"] == pytest.approx(sum(hbm[kind] for kind in kinds))
    sizes = jax.tree.leaves(jax.tree.map(np.size, experiment.teacher.params))
    assert 2 * sum(sizes) < hbm["teacher"] * 2**30 <= 4 * sum(sizes), "half of it may be split"
    flags = [*FLAGS, "--config.distill.teacher_variant=R50x1", "--config.model.dtype=bfloat16"]
    experiment = Experiment.declared(configs.load(tiny, flags))
    assert experiment.teacher.model.dtype == jnp.bfloat16
    assert experiment.teacher.model.image_size == (8, 8)


# --- what does not fit ---


def test_what_does_not_fit_is_named(tiny, tmp_path):
    with pytest.raises(UserError, match="the teacher has 7 classes, but the model has 10: choose"):
        make(tiny, teacher=small_teacher(num_classes=7))
    named = dataclasses.replace(small_teacher(), class_names=("cat", "dog"))
    named.check(10, ("cat", "dog", "emu"), make(tiny).mesh)
    with pytest.raises(
        UserError, match="class 1 of the teacher is 'dog', but that of the training"
    ):
        named.check(10, ("cat", "cow"), None)
    for teacher, message in {
        "": "distill.teacher is empty: give the weights",
        "no/such": "distill.teacher: no/such does not exist: give .*or give distill.teacher_vari",
    }.items():
        flags = [*FLAGS, f"--config.distill.teacher={teacher}"]
        with pytest.raises(UserError, match=message):
            Experiment.declared(configs.load(tiny, flags))
    with pytest.raises(UserError, match=r"distill\.teacher_variant: unknown variant 'X/1'"):
        Experiment.declared(configs.load(tiny, [*FLAGS, "--config.distill.teacher_variant=X/1"]))
    with pytest.raises(UserError, match=r"temperature .* has no effect with distill.kind=hard"):
        configs.load(tiny, [*FLAGS, "--config.distill.temperature=2"])


def test_a_distilled_model_starts_from_weights_of_a_distilled_model_alone(tiny):
    """Both ways: the token changes the function of the model."""

    def weights(distilled: bool) -> load.Weights:
        sizes = dict(width=32, depth=2, mlp_dim=64, num_heads=4)
        model = vit_jax.create_model("Ti/4", 10, 8, distilled=distilled, **sizes)
        shapes = load.flatten(create.abstract_params(model))
        zeros = {name: np.zeros(leaf.shape, np.float32) for name, leaf in shapes.items()}
        return load.Weights(zeros, create.fields(model))

    for ours in (True, False):
        flags = [f"--config.model.distilled={ours}", "--config.init_from=x"]
        flags += ["--config.distill.teacher=x", "--config.model.pool=tok", FLAGS[0]]
        config = configs.load(tiny, flags)
        experiment = build_experiment(config, teacher=small_teacher())
        states.pretrained_state(experiment, weights(ours))
        with pytest.raises(UserError, match=f"differ in distilled: add .*distilled={not ours}"):
            states.pretrained_state(experiment, weights(not ours))


# --- runs ---


@pytest.fixture(scope="module")
def lesson(tmp_path_factory):
    """(config file, flags of the student, its workdir), beside that of its teacher."""
    folder = tmp_path_factory.mktemp("lesson")
    (folder / "tiny.py").write_text(TINY)
    tiny = str(folder / "tiny.py")
    larger = ["--config.image_size=12", "--config.total_steps=20", "--config.optim.lr=3e-3"]
    assert run(tiny, folder / "teacher", *larger) == 0
    flags = [*FLAGS, f"--config.distill.teacher={folder}/teacher"]
    assert run(tiny, folder / "student", *flags) == 0
    return tiny, flags, folder / "student"


@pytest.mark.slow
def test_a_stopped_run_loads_its_teacher_again_and_continues_with_the_same_bits(
    lesson, tmp_path, monkeypatch, capsys
):
    tiny, flags, student = lesson
    stop = lambda self, step: 1 / 0 if step == 6 else None  # noqa: E731
    monkeypatch.setattr(ProfilerWindow, "before_step", stop)
    with pytest.raises(ZeroDivisionError):
        run(tiny, tmp_path, *flags)
    monkeypatch.undo()
    (tmp_path / "config.json").rename(tmp_path / "moved.json")
    other = [*flags, f"--config.distill.teacher={student}"]  # of another size, and other weights
    assert run(tiny, tmp_path, *other) == 2
    assert "is not the teacher with which the run in" in last_error(capsys)
    shutil.copytree(student.parent / "teacher", tmp_path / "copy")
    assert run(tiny, tmp_path, *flags, f"--config.distill.teacher={tmp_path}/copy") == 0
    for key in ("train/loss", "train/agreement", "eval/val/top1"):
        found, straight = ([line.get(key) for line in metric_lines(w)] for w in (tmp_path, student))
        assert found == straight, key
    assert same_bits(final_params(tmp_path), final_params(student))


@pytest.mark.slow
def test_a_run_records_its_teacher_and_saves_the_student_alone(lesson):
    _, _, student = lesson
    folder = checkpoint.find(student)
    recorded = json.loads((student / "config.json").read_text())["teacher_fingerprint"]
    weights = load.read(student.parent / "teacher")
    assert recorded == checkpoint.read_meta(folder)["teacher_fingerprint"]
    assert recorded == teachers.fingerprint(weights.params)
    assert not any("teacher" in path.name for path in pathlib.Path(folder).rglob("*"))
    assert "teacher     " in (student / "log.txt").read_text()
    model, params = vit_jax.from_pretrained(student)
    image = np.random.default_rng(0).normal(size=(3, 8, 8, 3)).astype(np.float32)
    heads = applied(model, params, image, apart=True)
    np.testing.assert_allclose(applied(model, params, image), sum(heads) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["published", "timm"])
def test_a_teacher_may_be_in_any_format_and_be_resized(form, lesson, tmp_path):
    tiny, _, student = lesson
    from vit_jax import convert

    path = tmp_path / ("w.npz" if form == "published" else "w")
    arguments = [str(student.parent / "teacher"), str(path), f"--format={form}"]
    assert convert.main(arguments) == 0
    flags = [*FLAGS, f"--config.distill.teacher={path}", "--config.distill.teacher_size=16"]
    config = configs.load(tiny, flags)
    teacher = teachers.read(config)
    assert teacher.model.image_size == (16, 16) and teacher.model.num_classes == 10
    experiment = build_experiment(config, teacher=teacher)
    assert experiment.abstract_state.teacher["head"]["kernel"].shape == (32, 10)
    placed = states.fresh_state(experiment).teacher
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(placed), teacher.params)
