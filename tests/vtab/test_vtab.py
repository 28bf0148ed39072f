"""The VTAB suite: its one program for all tasks, how it saves and continues, its table, and the
command.
"""

import json
import textwrap

import jax
import jax.numpy as jnp
import ml_collections
import mocked_tfds
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
import tensorflow_datasets as tfds
from conftest import ROOT, below, golden
from PIL import Image

from vit_jax import config as configs
from vit_jax.data import __main__ as data_command
from vit_jax.data.sources.vtab_tasks import VTAB
from vit_jax.distributed import mesh as meshes
from vit_jax.models import classifier
from vit_jax.train import experiment, optim
from vit_jax.train.objectives.objective import Objective
from vit_jax.vtab import __main__ as command
from vit_jax.vtab import protocol, report, suite, task_data, trainer

LIGHTWEIGHT, LIGHTWEIGHT_CONFIG = golden("vtab_lightweight")
TASKS = "dtd,oxford_iiit_pet,kitti_closest_vehicle_distance"
SMALL = textwrap.dedent(
    """
    import importlib.util

    def get_config(arg="vit"):
        spec = importlib.util.spec_from_file_location("vtab", {root!r} + "/configs/vtab.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config(arg)
        config.image_size, config.total_steps, config.data.batch_size = 12, 4, 32
        config.optim.warmup_steps = 1
        config.model = dict(variant="Ti/6", width=16, depth=1, mlp_dim=32, num_heads=2)
        config.vtab.seeds, config.vtab.max_test_examples = 2, 90
        return config
    """
)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A config file for a tiny model, and a folder with the mocked data of three tasks."""
    folder = tmp_path_factory.mktemp("vtab")
    (folder / "small.py").write_text(SMALL.format(root=str(ROOT)))
    for name in ("dtd:3.0.1", "oxford_iiit_pet:4.0.0", "kitti:3.1.0"):
        mocked_tfds.write(name, str(folder / "data"), mocked_tfds.COUNTS[name])
    return folder


def load(small, *overrides):
    return configs.load(f"{small}/small.py", [f"--config.data.data_dir={small}/data", *overrides])


def examples(count: int, rows: int, size: int, crop=True, flip=True, classes=3) -> trainer.Examples:
    """Images whose pixels contain the number of the image and their own row and column."""
    side = trainer.resized_side(size)
    row, column = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    number = np.arange(rows)[:, None, None]
    image = np.stack(np.broadcast_arrays(number, row, column), -1).astype(np.uint8)
    facts = map(jnp.asarray, (np.int32(count), np.int32(classes), crop, flip))
    return trainer.Examples(jnp.asarray(image), jnp.arange(rows) % classes, *facts)


def drawn(data, batch_size: int, size: int, steps, seed=0):
    draw = jax.jit(trainer.draw, static_argnums=(1, 2))
    return [
        jax.device_get(draw(data, batch_size, size, np.int32(seed), np.int32(number)))
        for number in steps
    ]


@pytest.mark.parametrize("count", [20, 15])
def test_every_epoch_holds_every_example_once(count):
    data = examples(count, 20, 6)
    numbers = np.concatenate(
        [batch["image"][:, 0, 0, 0] for batch in drawn(data, 12, 6, range(25))]
    )
    epochs = numbers[: len(numbers) // count * count].reshape(-1, count)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(count), (len(epochs), 1)))
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_a_batch_may_be_larger_than_the_data():
    numbers = drawn(examples(20, 20, 6), 64, 6, [3])[0]["image"][:, 0, 0, 0]
    assert sorted(np.bincount(numbers, minlength=20).tolist())[0] >= 2


def test_crops_and_flips_are_those_that_a_task_allows():
    size, side = 12, trainer.resized_side(12)
    for crop in (True, False):
        for flip in (True, False):
            batches = drawn(examples(20, 20, size, crop, flip), 16, size, range(20))
            image = np.concatenate([batch["image"] for batch in batches]).astype(int)
            top, left, right = image[:, 0, 0, 1], image[:, 0, 0, 2], image[:, 0, -1, 2]
            flipped = left > right
            assert flipped.any() == flip and (~flipped).any()
            corner = np.where(flipped, right, left)
            assert set(top) == set(corner) == (set(range(side - size + 1)) if crop else {0})
            np.testing.assert_array_equal(image[:, :, 0, 1], top[:, None] + np.arange(size))
            np.testing.assert_array_equal(
                np.sort(image[:, 0, :, 2]), corner[:, None] + np.arange(size)
            )


def test_what_is_drawn_depends_on_seed_and_step_alone():
    data = examples(20, 20, 6)
    (first,) = drawn(data, 8, 6, [5])
    (again,) = drawn(data, 8, 6, [5])
    (other,) = drawn(data, 8, 6, [5], seed=1)
    np.testing.assert_array_equal(first["image"], again["image"])
    assert (first["image"] != other["image"]).any()


def tuned(config, classes: int, head: int, steps: int):
    """The parameters after a few steps with a head of `head` classes."""
    mesh = meshes.make_mesh(config.mesh)
    model = experiment.make_model(config, head)
    with jax.set_mesh(mesh):
        params = jax.jit(Objective(model).init)(0)
        tuner = trainer.Finetuner(config, model, lambda seed: params, mesh, 24)
        rng = np.random.default_rng(0)
        image = rng.integers(0, 255, (24, 14, 14, 3), np.uint8)
        data = tuner.examples(
            image, rng.integers(0, classes, 24).astype(np.int32), classes, True, True
        )
        return jax.device_get(tuner.train(data, trainer.Setting(0.05, steps, 7)))


@pytest.mark.slow
def test_classes_that_a_task_does_not_have_change_nothing(small):
    config = load(small, "--config.model.dtype=float32", "--config.optim.momentum_dtype=float32")
    exact = tuned(config, 5, 5, 6)
    padded = tuned(config, 5, 128, 6)
    exact_head = exact.pop("head")["kernel"]
    padded_head = padded.pop("head")["kernel"]
    np.testing.assert_array_equal(padded_head[:, 5:], 0.0)
    np.testing.assert_allclose(padded_head[:, :5], exact_head, atol=1e-6)
    assert np.abs(exact_head).max() > 1e-3
    for one, other in zip(jax.tree.leaves(padded), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_schedules_are_stretched_with_the_number_of_steps():
    config = configs.load(f"{ROOT}/configs/vtab.py:lightweight")
    found = trainer.stretch_schedule(config, 10_000)
    assert found["warmup_steps"] == 800
    assert found["stairs"] == ((3_000, 0.1), (6_000, 0.01), (9_000, 0.001))


@pytest.mark.parametrize("case", LIGHTWEIGHT_CONFIG["cases"], ids=lambda case: case["total_steps"])
def test_the_lightweight_learning_rate_is_that_of_task_adaptation(case):
    config = configs.load(f"{ROOT}/configs/vtab.py:lightweight")
    total = case["total_steps"]
    assert case["lr"] in config.vtab.lrs and total in config.vtab.steps
    settings = trainer.stretch_schedule(config, total) | dict(lr=case["lr"])
    params = dict(head=dict(kernel=jnp.zeros([1, 1])))
    _, schedule = optim.make_optimizer(ml_collections.ConfigDict(settings), params, total)
    rates = [schedule(step) for step in LIGHTWEIGHT[f"{total}/steps"]]
    np.testing.assert_allclose(rates, LIGHTWEIGHT[f"{total}/lr"], rtol=1e-6)


def test_lightweight_images_are_those_of_task_adaptation(small, tmp_path):
    """Those of training and of evaluation; ours are rounded to the 256 values of uint8."""
    features = tfds.builder("dtd", data_dir="/nowhere").info.features
    own = [
        features.serialize_example(
            features.encode_example(dict(image=image, label=0, file_name="x"))
        )
        for image in below(LIGHTWEIGHT, "image").values()
    ]
    records = dict(train=own, test=own, validation=own)
    mocked_tfds.write("dtd:3.0.1", str(tmp_path), mocked_tfds.COUNTS["dtd:3.0.1"], records)
    given = [f"--config.data.data_dir={tmp_path}"]
    config = configs.load(f"{small}/small.py:lightweight", given)
    found = task_data.find("dtd", config)
    side = config.image_size
    timm = classifier.Classifier(image_size=(side, side), pixels_of="timm", interpolation="bicubic")
    training = task_data.training_set("dtd", found, config, side, timm).image
    mesh = meshes.make_mesh(config.mesh)
    _, batches = task_data.batches_of("dtd", found, "val200", config, mesh, timm)
    published = np.stack(list(below(LIGHTWEIGHT, "resized").values()))
    for image in (training[: len(own)], np.asarray(next(batches)["image"])[: len(own)]):
        np.testing.assert_allclose(image / 127.5 - 1, published, atol=0.5 / 127.5 + 1e-6)
    config = configs.load(f"{small}/small.py", given)  # of ViT, which resizes as the weights ask
    training = task_data.training_set("dtd", found, config, side, timm).image
    _, batches = task_data.batches_of("dtd", found, "val200", config, mesh, timm)
    for image in (training[: len(own)], np.asarray(next(batches)["image"])[: len(own)]):
        for pixels, whole in zip(image, below(LIGHTWEIGHT, "image").values(), strict=True):
            resized = Image.fromarray(whole).resize((side, side), Image.Resampling.BICUBIC)
            assert np.abs(pixels.astype(int) - np.asarray(resized)).max() <= 1


@pytest.mark.parametrize("name", protocol.PROTOCOLS)
def test_the_config_follows_its_protocol_and_departures_are_named(name):
    assert protocol.departures(configs.load(f"{ROOT}/configs/vtab.py:{name}")) == []
    changed = dict(image_size=448, seed=3) | {
        "optim.warmup_steps": 9,
        "optim.layer_decay": 0.5,
        "data.method": "bicubic",
        "data.randaug_layers": 2,
        "model.droppath": 0.1,
        "model.scan": True,
        "mesh.fsdp": 2,
        "vtab.seeds": 1,
        "evals.test.data.method": "bicubic",
    }
    arguments = [f"--config.{key}={value}" for key, value in changed.items()]
    said = protocol.departures(configs.load(f"{ROOT}/configs/vtab.py:{name}", arguments))
    assert {line.split(":")[0] for line in said} == changed.keys() - {
        "seed",
        "model.scan",
        "mesh.fsdp",
    }


def test_every_run_is_done_by_one_process():
    runs = [(name, seed) for name in VTAB for seed in range(3)]
    for count in (1, 3, 16, 57, 64):
        shares = [suite.share(runs, index, count) for index in range(count)]
        assert [run for share in shares for run in share] == runs
        assert max(map(len, shares)) == -(-57 // count)


def test_the_interval_is_that_of_students_t():
    values = [0.71, 0.74, 0.72]
    low, high = scipy.stats.t.interval(0.95, 2, loc=np.mean(values), scale=scipy.stats.sem(values))
    assert report.confidence(values) == pytest.approx((high - low) / 2)
    assert report.confidence([0.5]) is None


def test_means_are_those_of_whole_groups():
    top1 = {name: 0.01 * number for number, name in enumerate(VTAB)}
    tasks = {name: dict(top1=value) for name, value in top1.items()}
    assert report.mean_of(tasks, None) == pytest.approx(0.09)
    assert report.mean_of(tasks, "natural") == pytest.approx(0.03)
    assert report.mean_of(tasks, "specialized") == pytest.approx(0.085)
    tasks["dtd"]["top1"] = None
    assert report.mean_of(tasks, "natural") is None and report.mean_of(tasks, None) is None
    assert report.mean_of(tasks, "structured") == pytest.approx(0.145)


def run(small, workdir, *arguments) -> int:
    data = f"--config.data.data_dir={small}/data"
    return command.main(
        ["run", f"--config={small}/small.py", data, f"--workdir={workdir}", *arguments]
    )


@pytest.fixture(scope="module")
def done(small, tmp_path_factory):
    """The workdir of a suite of three tasks."""
    workdir = tmp_path_factory.mktemp("done")
    assert run(small, workdir, f"--tasks={TASKS}") == 0
    return workdir


def test_results_are_what_the_interface_promises(done):
    found = json.loads((done / "vtab.json").read_text())
    assert found.keys() >= {"protocol", "standard", "checkpoint", "tasks", "means"}
    assert found["protocol"] == "vit"
    assert found["means"].keys() == {"natural", "specialized", "structured", "all"}
    assert not found["standard"]
    assert list(found["tasks"]) == TASKS.split(",")
    keys = "group top1 seeds ci95 num_train num_test lr steps status error"
    for name, task in found["tasks"].items():
        assert task.keys() >= set(keys.split())
        assert (task["num_train"], task["num_test"]) == (1_000, 90)
        assert (task["lr"], task["steps"]) == (0.01, 4)
        assert task["top1"] == pytest.approx(np.mean(task["seeds"])) and len(task["seeds"]) == 2
        assert (task["status"], task["error"], task["group"]) == ("done", None, VTAB[name].group)
        assert all(round(value * 90, 6).is_integer() for value in task["seeds"])
    table = (done / "vtab.md").read_text()
    assert "non-standard" in table
    assert "90 of 1,880 test images" in table
    assert "- image_size: 384 -> 12" in table
    assert (done / "vtab.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_a_suite_goes_on_where_it_was_and_ends_with_the_same_numbers(
    small, done, tmp_path, monkeypatch
):
    real, runs = suite.Suite.run, []

    def interrupted(self, name, seeds, *arguments):
        runs.append((name, len(seeds)))
        if name.startswith("kitti") and len(runs) == 3:
            raise KeyboardInterrupt
        return real(self, name, seeds, *arguments)

    monkeypatch.setattr(suite.Suite, "run", interrupted)
    assert run(small, tmp_path, f"--tasks={TASKS}") == 130
    tasks = json.loads((tmp_path / "vtab.json").read_text())["tasks"]
    assert [task["status"] for task in tasks.values()] == ["done", "done", "pending"]
    (tmp_path / "tasks" / "dtd.1.json").write_text("{")
    assert run(small, tmp_path, f"--tasks={TASKS}") == 0
    assert runs == [
        *((name, 2) for name in TASKS.split(",")),
        ("dtd", 1),
        ("kitti_closest_vehicle_distance", 2),
    ]
    seeds = []
    for folder in (done, tmp_path):
        tasks = json.loads((folder / "vtab.json").read_text())["tasks"]
        seeds.append({name: task["seeds"] for name, task in tasks.items()})
    assert seeds[0] == seeds[1]


DAMAGED = ["{", '"x"', "[]", '{"status": "done"}', '{"status": "done", "top1": "a", "data": []}']


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_result_counts_as_none(small, done, tmp_path, text):
    results = report.Results(tmp_path, load(small), ["dtd"])
    results.begin()
    for seed in (0, 1):
        results.path("dtd", seed).write_text((done / f"tasks/dtd.{seed}.json").read_text())
    assert results.begin() == [] and results.of_task("dtd")["status"] == "done"
    results.path("dtd", 1).write_text(text)
    assert results.of_task("dtd")["status"] == "pending" and results.begin() == [("dtd", 1)]
    assert results.missing(["dtd"])


def test_a_suite_in_parts_ends_with_one_table(small, done):
    assert run(small, done, "--tasks=dtd") == 0
    assert list(json.loads((done / "vtab.json").read_text())["tasks"]) == TASKS.split(",")


def test_other_data_of_one_seed_label_the_task(small, done, tmp_path):
    results = report.Results(tmp_path, load(small), ["dtd"])
    results.begin()
    for seed in (0, 1):
        one = json.loads((done / f"tasks/dtd.{seed}.json").read_text())
        one["data"] |= dict(is_known=False if seed == 1 else None, unreadable=3 * seed)
        results.path("dtd", seed).write_text(json.dumps(one))
    found = results.collect()
    assert "dtd: other training examples" in found["departures"]
    assert "dtd: 3 images can't be read" in found["departures"]


def test_a_workdir_of_another_suite_is_refused(small, done, capsys):
    assert run(small, done, f"--tasks={TASKS}", "--config.optim.lr=0.02") == 2
    assert "optim.lr: 0.01 -> 0.02" in capsys.readouterr().err.splitlines()[-1]


def test_a_task_that_fails_ends_no_other(small, tmp_path, capsys):
    assert run(small, tmp_path, "--tasks=dtd,resisc45,kitti_closest_vehicle_distance") == 1
    found = json.loads((tmp_path / "vtab.json").read_text())["tasks"]
    assert {name: task["status"] for name, task in found.items()} == {
        "dtd": "done",
        "resisc45": "missing",
        "kitti_closest_vehicle_distance": "done",
    }
    assert "vtab check" in found["resisc45"]["error"] and found["resisc45"]["top1"] is None
    last = capsys.readouterr().err.splitlines()[-1]
    assert "1 of 3 tasks have no result, the first is resisc45" in last


def test_a_suite_without_any_data_stops_at_once(small, tmp_path, capsys):
    weights = f"--config.init_from={tmp_path}/are_not_read.npz"
    assert run(small, tmp_path, "--tasks=resisc45", weights) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the data of none of the 1 tasks are there, such as resisc45" in last


@pytest.fixture
def with_damaged_image(tmp_path):
    """A folder with dtd, where every 97th training record is not an image."""
    features, rng = tfds.builder("dtd", data_dir="/nowhere").info.features, np.random.default_rng(1)
    own = [
        features.serialize_example(features.encode_example(mocked_tfds.value("", features, rng)))
        for _ in range(96)
    ]
    bad = tf.train.Example.FromString(own[0])
    bad.features.feature["image"].bytes_list.value[0] = b"no image"
    records = dict(train=[*own, bad.SerializeToString()], test=own, validation=own)
    mocked_tfds.write("dtd:3.0.1", str(tmp_path / "data"), mocked_tfds.COUNTS["dtd:3.0.1"], records)
    return tmp_path


@pytest.mark.slow
def test_an_image_that_can_not_be_read(small, with_damaged_image, capsys):
    where = [
        f"--config={small}/small.py",
        f"--config.data.data_dir={with_damaged_image}/data",
        "--tasks=dtd",
    ]
    assert command.main(["check", *where, f"--json={with_damaged_image}/check.json"]) == 1
    row = json.loads((with_damaged_image / "check.json").read_text())["dtd"]
    assert row["state"] == "damaged" and "can't be decoded" in row["detail"]
    strict = with_damaged_image / "strict"
    lenient = with_damaged_image / "lenient"
    assert command.main(["run", *where, f"--workdir={strict}"]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert json.loads((strict / "vtab.json").read_text())["tasks"]["dtd"]["status"] == "failed"
    skip = "--config.data.on_corrupt=skip"
    assert command.main(["run", *where, f"--workdir={lenient}", skip]) == 0
    found = json.loads((lenient / "vtab.json").read_text())
    assert found["tasks"]["dtd"]["num_train"] == 992
    assert "dtd: 8 images can't be read" in found["departures"]


def test_data_that_can_not_be_opened_stop_no_other(small, tmp_path, capsys):
    for name in ("dtd:3.0.1", "kitti:3.1.0"):
        mocked_tfds.write(name, str(tmp_path), mocked_tfds.COUNTS[name])
    mocked_tfds.write("eurosat/rgb:2.0.0", str(tmp_path), dict(train=26_999))
    info = tmp_path / "kitti/3.1.0/dataset_info.json"
    info.write_text(info.read_text()[:200])
    names = "dtd,eurosat,kitti_closest_vehicle_distance"
    where = [f"--config={small}/small.py", f"--config.data.data_dir={tmp_path}", f"--tasks={names}"]
    assert command.main(["check", *where, f"--json={tmp_path}/check.json"]) == 1
    rows = json.loads((tmp_path / "check.json").read_text())
    states = {name: row["state"] for name, row in rows.items()}
    assert states == dict(
        dtd="ready", eurosat="wrong count", kitti_closest_vehicle_distance="damaged"
    )
    capsys.readouterr()
    assert command.main(["prepare", *where]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(
        "error: 2 of 3 tasks are not prepared: eurosat, kitti_closest_vehicle_distance"
    )
    assert any("26,999 examples" in line or "can't be" in line for line in lines)
    assert "remove" in "".join(lines)


@pytest.mark.slow
def test_a_setting_is_chosen_on_val200_of_those_that_are_finite(small, tmp_path, monkeypatch):
    asked = []

    def evaluate(self, all_params, batches, classes):
        count = sum(float(batch["mask"].sum()) for batch in batches)
        asked.append((len(all_params), count))
        return [
            dict(top1=0.1 * place if len(all_params) == 4 else 0.5, count=count)
            for place in range(len(all_params))
        ]

    monkeypatch.setattr(trainer.Finetuner, "evaluate", evaluate)
    flags = [
        "--config.vtab.lrs=(0.01, 0.03, 1e6)",
        "--config.vtab.steps=(4, 5)",
        "--config.vtab.seeds=1",
    ]
    flags += ["--config.optim.grad_clip_norm=0.0", "--config.max_skipped=1"]
    assert run(small, tmp_path, "--tasks=dtd", *flags) == 0
    assert asked == [(4, 200.0), (1, 90.0)]
    task = json.loads((tmp_path / "vtab.json").read_text())["tasks"]["dtd"]
    assert (task["lr"], task["steps"], task["ci95"]) == (0.03, 5, None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tasks=cifar10"], "VTAB has no task 'cifar10': choose one of caltech101"),
        (["--config.data.crop=inception"], "data.crop=inception is not for VTAB"),
        (["--config.label_smoothing=0.1"], "label_smoothing is not for vtab"),
        (["--config.loss=multilabel_xent"], "loss=multilabel_xent is not for vtab"),
        (["--config.evals.test.data.split=train"], "evals.test.data.split has no effect in vtab"),
        (["--config.data.subset=10%"], "data.subset has no effect in vtab"),
        (
            ["--config.total_steps=0", "--config.total_epochs=1"],
            "total_epochs has no effect in vtab",
        ),
        (["--config.total_steps=0"], "total_steps=0: the protocols count steps"),
        (
            ["--config.evals.test.data.batch_size=30"],
            "batch_size=30 is not divisible by the 8 devices",
        ),
        (["--config.vtab.lrs=(0.1, -1)"], "config key vtab.lrs has -1"),
        (["--config.vtab.lrs=('a',)"], "config key vtab.lrs has 'a'"),
    ],
)
def test_mistakes_are_one_line(small, tmp_path, capsys, arguments, says):
    assert run(small, tmp_path / "new", *arguments) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and says in last


def test_another_config_has_no_settings_of_vtab(tmp_path, capsys):
    demo = f"--config={ROOT}/configs/demo.py"
    assert command.main(["check", demo]) == 2
    assert "has no VTAB settings" in capsys.readouterr().err
    assert command.main(["check", demo, "--config.vtab.seeds=1"]) == 2
    assert "config key vtab.seeds belongs to VTAB's settings" in capsys.readouterr().err


def test_check_reports_the_state_of_every_task(small, capsys, tmp_path):
    data = f"--config.data.data_dir={small}/data"
    arguments = [
        "check",
        f"--config={small}/small.py",
        data,
        "--tasks=dtd,resisc45,svhn",
        f"--json={tmp_path}/check.json",
    ]
    assert command.main(arguments) == 1
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].startswith(
        "error: 2 of 3 tasks are not ready, the first is svhn"
    )
    rows = json.loads((tmp_path / "check.json").read_text())
    assert {name: row["state"] for name, row in rows.items()} == dict(
        dtd="ready", svhn="missing", resisc45="manual"
    )
    advice = rows["svhn"]["detail"]
    assert "python -m vit_jax.vtab prepare --config=configs/vtab.py --tasks=svhn" in advice
    assert "--config.data.data_dir=" in advice and "1.6 GB" in advice
    assert "downloads/manual" in rows["resisc45"]["detail"] and "rar" in rows["resisc45"]["detail"]
    assert len(rows["dtd"]["fingerprint"]["pixels"]) == 16


def test_a_task_is_a_data_set_of_the_other_commands(small, tmp_path, capsys):
    given = [
        f"--config={ROOT}/configs/demo.py",
        "--config.data.name=vtab:dtd",
        "--config.data.split=train800",
    ]
    given += [f"--config.data.data_dir={small}/data", "--config.evals.val.data.split=val200"]
    output = [f"--json={tmp_path}/check.json", f"--out={tmp_path}"]
    assert data_command.main(["check", *given, *output]) == 0
    train, val = json.loads((tmp_path / "check.json").read_text())["data"]
    assert (train["num_examples"], val["num_examples"]) == (800, 200)
    assert train["splits"]["test"] == 1_880
    assert data_command.main(["prepare", *given]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "vit_jax.vtab prepare --config=configs/vtab.py --tasks=dtd" in last
