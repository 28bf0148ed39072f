"""The rules of `vit_jax finetune FOLDER` as tables: facts -> choices. Nothing is trained."""

import dataclasses
import json
import logging
import types

import numpy as np
import pytest
from scipy import stats

from vit_jax import config as configs
from vit_jax.errors import UserError
from vit_jax.train import experiment
from vit_jax.train.recipe import choose, facts, held_out, measure, prepare, report, trials
from vit_jax.train.recipe.choose import Plan, Sizes

CPU = facts.Device("CPU", True, 1, 8 * 2**30, False)
GPU = facts.Device("NVIDIA H100", False, 1, 70 * 2**30, True)
TWO_GPUS = facts.Device("NVIDIA H100", False, 2, 70 * 2**30, True)


def data(counts, **more) -> facts.Data:
    labels = np.repeat(np.arange(len(counts)), counts)
    names = tuple(f"class {i}" for i in range(len(counts)))
    return facts.Data("folder:photos", "train", labels, names, len(counts), **more)


@pytest.mark.parametrize(
    "count, wanted",
    [(162, 32), (999, 200), (5_000, 500), (50_000, 1_000), (1_000_000, 20_000)],
)
def test_the_held_out_share_falls_with_the_number_of_images(count, wanted):
    counts = [count // 3, count // 3, count - 2 * (count // 3)]
    _, sizes = held_out.hold_out(data(counts))
    assert sizes.held_out == pytest.approx(wanted, abs=1)
    assert sizes.train + sizes.held_out == count


@pytest.mark.parametrize(
    "counts", [[3, 3, 3, 3], [2, 2], [100, 3, 2, 2], [30, 1], [50, 50, 1, 40], [7] * 20]
)
def test_every_class_is_trained_on_and_held_out(counts):
    part, _ = held_out.hold_out(data(counts))
    percent = 100 - float(part.values["data.subset"].rstrip("%"))
    labels = data(counts).labels
    seed = part.values["data.subset_seed"]
    trained = held_out.part_without(labels, percent, seed, "photos")
    assert (np.bincount(labels[trained], minlength=len(counts)) > 0).all()
    others = np.bincount(labels[~trained], minlength=len(counts))
    assert (others[np.asarray(counts) > 1] > 0).all()


def test_a_split_for_validation_is_what_is_held_out_unless_a_share_is_wanted():
    with_val = data([80, 80], val="val", num_val=40)
    part, sizes = held_out.hold_out(with_val)
    assert part.values == {"evals.held_out.data.split": "val"}
    assert sizes == Sizes(160, 40)
    part, sizes = held_out.hold_out(with_val, "25%")
    assert part.values["data.subset"] == "75%" and sizes == Sizes(120, 40)


@pytest.mark.parametrize(
    "counts, says",
    [
        ([9], r"images of one class only \(class 0\)"),
        ([0, 9, 0], r"images of one class only \(class 1\)"),
        ([1, 1, 1], "one image of each class: at least two are needed"),
    ],
)
def test_what_no_classifier_can_be_trained_on(counts, says):
    with pytest.raises(UserError, match=says):
        choose.check(data(counts))


def test_images_with_several_labels_may_have_the_same_first_one():
    choose.check(data([9], many_labels=True))
    with pytest.raises(UserError, match="has no image with a label"):
        choose.check(facts.Data("csv:x", "train", np.full(3, -1), ("a",), 1, many_labels=True))


@pytest.mark.parametrize(
    ("split", "val", "test"),
    [("train", "val", "test"), ("train+val", "", "test"), ("train+val[:50%]+test", "", "")],
)
def test_what_is_trained_on_is_not_held_out(split, val, test):
    found = facts.read_data(prepare.Wish("digits", "x", {"data.split": split}).data())
    assert (found.val, found.test) == (val, test)
    sizes = dict(train=9, val=9, validation=9)  # two names of one split
    for trained in (["all"], ["train", "validation"]):
        assert facts.first_free(facts.VAL, sizes, trained) == ""


def test_what_is_held_out_can_not_be_of_other_data():
    given = {"data.split": "train+val", "evals.held_out.data.split": "test"}
    with pytest.raises(UserError, match=r"evals.held_out.data.split has no effect"):
        prepare.find(prepare.Wish("digits", "x", given))


def test_trial_runs_have_the_shape_of_the_final_one():
    given = {"optim.cooldown_steps": 200, "optim.schedule": "rsqrt", "spikes.factor": 3.0}
    trial = trials.shorter(prepare.Wish("x", "y", given).config(total_steps=500), 0.1, 500)
    assert (trial.total_steps, trial.optim.cooldown_steps, trial.spikes.factor) == (100, 40, 0)
    given = {"optim.schedule": "stair", "optim.stairs": ((250, 0.1),)}
    trial = trials.shorter(prepare.Wish("x", "y", given).config(total_steps=500), 0.1, 500)
    assert trial.optim.stairs == ((50, 0.1),)


def test_many_classes_with_one_image_are_named():
    with pytest.raises(UserError, match=r"60 classes of folder:photos train have one image each"):
        held_out.hold_out(data([40] + [1] * 60))


@pytest.mark.parametrize("share, count", [(0.9, 32), (1.0, 12), (0.0, 5), (0.5, 1), (0.97, 10_000)])
def test_the_interval_is_wilsons(share, count):
    result = stats.binomtest(round(share * count), count).proportion_ci(0.95, "wilson")
    low, high = held_out.interval(round(share * count) / count, count)
    assert (low, high) == pytest.approx((result.low, result.high), abs=2e-4)


@pytest.mark.parametrize(
    "train, device, batch",
    [
        *[(2, CPU, 2), (12, CPU, 8), (130, CPU, 16), (1_000, GPU, 64), (4_096, GPU, 512)],
        *[(10**6, GPU, 512), (12, TWO_GPUS, 8), (1, TWO_GPUS, 2)],
    ],
)
def test_the_batch_is_a_power_of_two(train, device, batch):
    choice = choose.batch_size(Sizes(train, 1), device)
    assert choice.values == {"data.batch_size": batch}


@pytest.mark.parametrize(
    "train, batch, steps",
    [
        (130, 16, 406),  # 50 epochs
        (1_000, 64, 500),  # BiT-HyperRule
        (19_000, 512, 500),
        (50_000, 512, 4_883),  # 50 epochs, fewer than 10,000 steps
        (400_000, 512, 10_000),
        (1_281_167, 512, 20_000),  # 8 epochs, as in table 4 of arXiv 2010.11929
        (2, 2, 50),
    ],
)
def test_the_length_is_bits_rule_or_fifty_epochs(train, batch, steps):
    sizes = Sizes(train, 10, batch)
    assert sizes.steps(choose.EPOCHS) == steps
    assert steps * batch / train < 300, "more would be a warning"
    assert Sizes(train, 10, batch, given=7).steps(choose.EPOCHS) == 7


@pytest.mark.parametrize("total, trial", [(20, 20), (100, 50), (406, 81), (20_000, 500)])
def test_trial_runs_are_short(total, trial):
    assert choose.trial_steps(total) == trial


@pytest.mark.parametrize(
    "step_s, wanted",
    [
        (0.1, Plan(False, choose.LRS, 50)),  # a tiny model
        (4.0, Plan(False, (0.01,), 25)),
        (9.5, Plan(True, (0.001,), 50)),
        (16.0, Plan(True, (0.001,), 20)),  # B/16 on two cores, in float32
        (40.0, Plan(True, (0.001,), 10)),
        (900.0, Plan(True, (0.001,), 5)),  # too long in any case
    ],
)
def test_a_cpu_does_what_ends_in_time(step_s, wanted):
    """162 photos, batches of 16; a step of the head alone takes a third of the time."""
    sizes = Sizes(130, 32, 16)
    asked = []

    def cost_of(head_only: bool):
        asked.append(head_only)
        step = step_s / 3 if head_only else step_s
        return types.SimpleNamespace(step_s=step, eval_s=step_s / 48, compile_s=5.0)

    plan, seconds = choose.choose_plan(choose.plans(CPU, ()), sizes, cost_of)
    assert plan == wanted
    assert seconds < choose.PATIENT_S or step_s == 900.0
    assert (False in asked) == (step_s < 40), "what is hopeless is not measured"


def test_an_accelerator_always_trains_everything():
    cost = types.SimpleNamespace(step_s=100.0, eval_s=1.0, compile_s=5.0)
    plan, seconds = choose.choose_plan(
        choose.plans(GPU, ()), Sizes(10**6, 10**4, 512), lambda head_only: cost
    )
    assert plan == Plan(False, choose.LRS, 50)
    # Three trial runs of 500 steps, 20,000 steps; 3 + 20 evaluations; four starts.
    assert seconds == 21_500 * 100 + 23 * 10**4 + 4 * (5 + choose.START_S)


@pytest.mark.parametrize(
    "counts, values", [([30, 10], None), ([31, 10], {"data.class_balance": 0.5}), ([9, 0, 9], None)]
)
def test_classes_are_balanced_if_one_has_three_times_as_many_images(counts, values):
    found = choose.classes(data(counts))
    assert [choice.values for choice in found] == ([values] if values else [])


def test_images_without_a_label_are_in_no_class():
    """With several labels for an image, some may have none."""
    found = facts.Data("csv:x", "train", np.asarray([-1, 0, 1, 1, -1, 0]), (), 2, many_labels=True)
    assert found.counts.tolist() == [2, 2]
    choose.check(found)
    assert held_out.hold_out(found)[1].train >= 3


def test_classes_without_names_are_called_by_their_numbers(tmp_path, monkeypatch):
    code = "import io\nimport numpy as np\nfrom PIL import Image\n\n\nclass Noise:\n"
    code += "    num_classes = 3\n\n    def __len__(self):\n        return 8\n\n"
    code += "    def __getitem__(self, i):\n        buffer = io.BytesIO()\n"
    code += "        Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(buffer, 'png')\n"
    code += "        return buffer.getvalue(), min(i, 1)\n\n\n"
    code += "def open_split(split):\n    return Noise()\n"
    (tmp_path / "my_noise.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = facts.read_data(prepare.Wish("my_noise:open_split", "w.npz").data())
    assert found.class_names == ("class 0", "class 1", "class 2")
    assert found.largest == ("class 1", 7 / 8)
    assert data([2, 1], many_labels=True).largest == ("", 0.0)


def test_several_labels_need_another_loss():
    (choice,) = choose.classes(data([100, 1], many_labels=True))
    assert choice.values == {"loss": "sigmoid_xent"}


@pytest.mark.parametrize("head_only", [False, True])
@pytest.mark.parametrize("overrides", [{}, {"total_epochs": 3.0, "optim.lr": 0.5}])
def test_choices_make_a_config_that_the_user_overrides(head_only, overrides):
    wish = prepare.Wish("folder:photos", "B_16.npz", overrides)
    part, sizes = held_out.hold_out(data([80, 82], test="test"))
    start = facts.Start("B_16.npz", "B/16", 224)
    choices = [choose.model(start, CPU), part, choose.batch_size(sizes, CPU)]
    choices += [choose.augmentation(sizes), *choose.report_on(data([80, 82], test="test"))]
    choices += choose.training(Plan(head_only), sizes)
    config = wish.config(choices)
    assert config.image_size == 224 and config.model.variant is None
    assert config.data.subset == "80%" and config.evals.held_out.data.rest
    assert config.evals.test.data.split == "test" and config.early_stopping
    assert config.optim.frozen == (choose.ALL_BUT_HEAD if head_only else "")
    assert config.total_epochs == (3.0 if overrides else 0.0)
    assert config.optim.lr == (0.5 if overrides else Plan().lrs[0])
    row = wish.row(choose.rates(Plan(), 100), config)
    assert (row[2] == "set on the command line") == bool(overrides)


@pytest.mark.parametrize("text", ["-config.total_steps=7", "--config.total_steps 7"])
def test_overrides_may_have_one_dash_or_two_words(text):
    assert prepare.read_overrides(text.split()) == {"total_steps": 7}


def test_the_data_are_read_as_the_overrides_say():
    given = prepare.read_overrides(["--config.data.split", "all", "--noconfig.data.flip"])
    assert prepare.Wish("folder:photos", "B_16.npz", given).data().data.split == "all"


BEFORE = {"total_steps": 7, "accum_steps": 2}


def saved_recipe(folder):
    """As written by a first start, which found that 2 microbatches do not fit."""
    wish = prepare.Wish("folder:photos", "B_16.npz", BEFORE, (0.1, 0.2), "20%")
    config = measure.with_microbatches(wish.config(), 4)
    prepare.save(folder, prepare.Recipe(config, 7, (0.1, 0.2), [], wish.flags()))


def test_the_same_flags_continue_with_the_same_choices(tmp_path):
    saved_recipe(tmp_path)
    again = prepare.Wish("folder:photos", "B_16.npz", BEFORE, (0.1, 0.2), "20%")
    recipe = prepare.load(tmp_path, again)
    assert recipe.config.accum_steps == 4 and recipe.config.total_steps == recipe.steps == 7
    assert recipe.lrs == (0.1, 0.2)
    other = dataclasses.replace(again, given=BEFORE | {"accum_steps": 8})
    assert prepare.load(tmp_path, other).config.accum_steps == 8, "it may change"


def test_a_recipe_of_another_version(tmp_path):
    saved_recipe(tmp_path)
    path = tmp_path / "config.json"
    record = json.loads(path.read_text())
    del record["largest"]
    path.write_text(json.dumps(record))
    wish = prepare.Wish("folder:photos", "B_16.npz", BEFORE, (0.1, 0.2), "20%")
    assert prepare.load(tmp_path, wish).largest == ("", 0.0)
    record["config"]["optim"]["momentun"] = 0.9
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"key optim.momentun, which this version does not have"):
        prepare.load(tmp_path, wish)


@pytest.mark.parametrize(
    "given, lrs, share, says",
    [
        (BEFORE | {"total_steps": 9}, (0.1, 0.2), "20%", "--config.total_steps: 7 -> 9"),
        ({"accum_steps": 2}, (0.1, 0.2), "20%", r"--config.total_steps: 7 -> \(unset\)"),
        (BEFORE, (0.1,), "20%", "--lrs: 0.1,0.2 -> 0.1"),
        (BEFORE, (0.1, 0.2), "", r"--held_out: 20% -> \(unset\)"),
    ],
)
def test_other_flags_are_named(tmp_path, given, lrs, share, says):
    saved_recipe(tmp_path)
    with pytest.raises(UserError, match=says):
        prepare.load(tmp_path, prepare.Wish("folder:photos", "B_16.npz", given, lrs, share))


def test_accuracy_without_a_number_of_images_has_no_interval():
    final = {"eval/mine/top1": 0.5, "eval/val/top1": 0.5, "eval/val/count": 100.0}
    (_, mine), (_, val) = report.results(final)
    assert mine == "top1 50.00%" and val == "top1 50.00% (40.4% to 59.6%, 100 images)"


@pytest.mark.parametrize(
    "rows, numbers", [(30, [2, 5, 10, 30]), (16, [2, 4, 8, 16]), (15, [3, 15]), (1, [])]
)
def test_microbatches_until_each_has_one_row(rows, numbers):
    found = []
    number = measure.more_microbatches(1, rows)
    while number:
        found.append(number)
        number = measure.more_microbatches(number, rows)
    assert found == numbers


def test_the_measurement_is_that_of_process_0(monkeypatch):
    slow, fast = (measure.Measured(step_s, 1.0, 1.0, 2, 8) for step_s in (9.0, 0.1))
    first = json.dumps(dataclasses.asdict(slow))
    monkeypatch.setattr(measure.messages, "all_gather", lambda what, text, s: [first, text])
    assert measure.of_process_0(fast) == slow


def test_the_default_workdir_is_named_after_the_images():
    names = {
        **{"photos": "photos-finetuned", "/data/my photos/": "my photos-finetuned"},
        **{"csv:/data/list.csv": "list-finetuned", "cifar10": "cifar10-finetuned"},
    }
    assert {text: prepare.default_workdir(text) for text in names} == names


def test_a_workdir_among_the_images_would_be_a_class(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError, match="is inside the folder of images"):
        prepare.check_outside("~/photos/run", f"folder:{tmp_path}/photos")
    name = f"folder:{tmp_path}/photos"
    prepare.check_outside(str(tmp_path / "photos-finetuned"), name)
    for inside in ("photos", "photos/out", "photos/../photos/out/run"):
        with pytest.raises(UserError, match="is inside the folder of images"):
            prepare.check_outside(str(tmp_path / inside), name)


def test_data_sets_by_what_a_user_types(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "list.csv").touch()
    assert facts.data_set(str(tmp_path / "photos")) == f"folder:{tmp_path}/photos"
    assert facts.data_set(str(tmp_path / "list.csv")) == f"csv:{tmp_path}/list.csv"
    for name in ("cifar10", "digits", "tars:x", "folder:y"):
        assert facts.data_set(name) == name
    assert facts.data_set("gs://bucket/photos") == "folder:gs://bucket/photos"
    assert facts.data_set("imagenette/160px-v2") == "imagenette/160px-v2"
    with pytest.raises(UserError, match=r"is neither a folder of images, a \.csv or \.tar file"):
        facts.data_set(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="is a task of VTAB"):
        facts.data_set("vtab:dmlab")


def test_every_key_of_a_choice_is_one_of_the_config():
    known = configs.known_keys()
    sizes = Sizes(130, 32, 16)
    choices = [*choose.training(Plan(), sizes), *choose.training(Plan(True), sizes)]
    for choice in choices:
        assert all(configs.generic(key) in known for key in choice.values), choice


@pytest.mark.parametrize(
    "changes, warns",
    [
        (dict(), True),
        (dict(total_steps=75), False),  # 300 epochs
        (dict(init_from=""), False),  # pretraining
        (dict(data=dict(name="vtab:dmlab", batch_size=512)), False),  # a published protocol
    ],
)
def test_more_than_300_epochs_of_a_fine_tuning_are_a_warning(caplog, changes, warns):
    settings = dict(init_from="B_16.npz", data=dict(name="folder:photos", batch_size=512))
    total_steps = changes.pop("total_steps", 2_500)
    config = configs.defaults()
    config.update(settings | changes)
    found = types.SimpleNamespace(
        config=config, total_steps=total_steps, facts=types.SimpleNamespace(num_examples=128)
    )
    logging.getLogger("vit_jax").propagate = True
    experiment.warn_of_epochs(found)
    assert ("2,500 steps of 512 images are 10,000 epochs of the 128 images" in caplog.text) == warns


def test_a_variant_with_weights_says_that_the_weights_are_not_read(caplog):
    logging.getLogger("vit_jax").propagate = True
    values = {"init_from": "missing.npz", "model.variant": "B/16", "data.name": "cifar10"}
    config = configs.from_values(values | {"total_steps": 1})
    assert not experiment.declared_start(config)
    assert "init_from=missing.npz is not read" in caplog.text
