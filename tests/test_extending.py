"""The examples of docs/extending.md: one run with a part of every kind does what independent numbers
say, and continues with the same bits; what does not fit is named at the start.
"""

import importlib
import json
import os
import re
import sys
import types

import jax
import numpy as np
import optax
import pytest
import scipy.special
from conftest import ROOT, applied, last_error, metric_lines
from PIL import Image

import vit_jax
from vit_jax import config as configs
from vit_jax import convert, predict
from vit_jax.checkpoints import read as checkpoint
from vit_jax.config import own_parts
from vit_jax.data import __main__ as data
from vit_jax.data.sources import open as sources
from vit_jax.errors import UserError
from vit_jax.evaluate import __main__ as evaluate
from vit_jax.evaluate import own
from vit_jax.models import create, flops
from vit_jax.train import __main__ as train
from vit_jax.train import workdir
from vit_jax.train.experiment import Experiment
from vit_jax.train.timer import ProfilerWindow
from vit_jax.weights import adapt
from vit_jax.weights.scan_layout import flatten

PAGE = (ROOT / "docs/extending.md").read_text()
FILES = {
    code.split("\n")[0].removeprefix("# "): code
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
}
CONFIGS = ("my_config.py", "my_pretraining.py")
STEPS = ["--config.log_every=1", "--config.checkpoint.every=3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The current folder, with the files of the page."""
    path = tmp_path_factory.mktemp("parts")
    for name, code in FILES.items():
        (path / name).write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr(sys, "path", list(sys.path))
        yield path
        for name in [name for name in sys.modules if name.startswith(("my_", "bad_"))]:
            del sys.modules[name]
        own_parts.named.clear()


def run(workdir) -> int:
    return train.main(["--config=my_config.py", f"--workdir={workdir}", *STEPS])


@pytest.fixture(scope="module")
def done(folder):
    """The workdir of one undisturbed run."""
    assert run("run") == 0
    return folder / "run"


def saved(workdir, step: int) -> dict[str, np.ndarray]:
    return flatten(checkpoint.read_params(workdir / f"checkpoints/{step}"))


def first_params(config):
    """Parameters before the first step."""
    objective = Experiment.declared(config).objective
    return jax.device_get(jax.jit(objective.init)(config.seed))


def test_every_kind_has_an_example_of_at_most_30_lines():
    kinds = {name for name, key in configs.KEYS.items() if key.own}
    config = "".join(FILES[name] for name in CONFIGS)
    assert kinds - {"evals.*.data.name"} == {
        *("objective", "loss", "optim.name", "optim.schedule", "data.augment"),
        *("evals.*.type", "model.variant", "data.name", "trackers"),
    }
    assert set(re.findall(r'"(my_\w+):\w+"', config)) == {
        name.removesuffix(".py") for name in FILES if name not in CONFIGS
    }
    assert max(len(code.splitlines()) for code in FILES.values()) <= 30
    for key in kinds:  # the page names every argument
        assert all(f"`{name}`" in PAGE for name in configs.KEYS[key].own), key


@pytest.mark.slow
def test_the_first_loss_is_that_of_the_parts(done):
    """Augmentation, model, labels and loss of step 1, again without the step's code."""
    config = configs.load("my_config.py")
    source = sources.open_training(config.data, config.user)
    from vit_jax.data import pipeline

    batch = next(pipeline.train_pipeline(config, source, np.arange(32), 6).batches())
    from vit_jax.data.augment.batch import OWN, augment_pixels

    params = first_params(config)
    mix_key, dropout_key = jax.random.split(jax.random.fold_in(jax.random.key(0), 0))
    key = jax.random.fold_in(jax.random.fold_in(mix_key, OWN), 0)

    @jax.jit
    def draw(image, seed):
        strength_key, noise_key = jax.random.split(key)
        strength = jax.random.uniform(strength_key, (32, 1, 1, 1))
        noise = jax.random.normal(noise_key, image.shape)
        return augment_pixels(config.data, image, seed), strength, noise

    image, strength, noise = map(np.asarray, draw(batch["image"], batch["seed"]))
    noise = 20 * strength * noise
    assert np.abs(noise).max() > 20, "it is not small"
    image = (image + noise).clip(0, 255) / 127.5 - 1
    module = importlib.import_module("my_model").ConvNet(2, config)
    logits = applied(module, params, image, train=True, rngs={"dropout": dropout_key})
    log_p = scipy.special.log_softmax(np.asarray(logits, np.float64), axis=1)
    log_p = log_p[np.arange(32), batch["label"]]
    expected = np.mean(-((1 - np.exp(log_p)) ** 2) * log_p)
    assert metric_lines(done)[0]["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert expected < 0.5 * np.mean(-log_p), "cross-entropy is another number"


@pytest.mark.slow
def test_the_learning_rate_and_the_steps_are_those_of_the_parts(done):
    """Every step of Lion changes every parameter by the learning rate, up or down."""
    rates = 1e-3 * 0.5 * (1 + np.cos(np.pi * np.arange(3) / 3))
    lines = metric_lines(done)
    assert [line["train/lr"] for line in lines] == pytest.approx([*rates, *rates], rel=1e-5)
    config = configs.load("my_config.py")
    before = flatten(first_params(config))
    after = saved(done, 3)
    signs = np.stack(np.meshgrid(*[[-1, 0, 1]] * 3), axis=-1).reshape(-1, 3)
    for name in before:
        change = (after[name] - np.asarray(before[name])).reshape(-1, 1)
        assert np.abs(change - signs @ rates).min(axis=1).max() < 1e-6, name
        assert np.abs(change).max() > 1e-4, name


@pytest.mark.slow
def test_a_stopped_run_continues_with_the_same_bits(done, monkeypatch):
    monkeypatch.setattr(
        ProfilerWindow, "before_step", lambda self, step: 1 / 0 if step == 5 else None
    )
    with pytest.raises(ZeroDivisionError):
        run("stopped")
    monkeypatch.undo()
    assert run("stopped") == 0
    stopped = done.parent / "stopped"
    for key in ("step", "train/loss", "train/grad_norm", "train/lr", "eval/val/ece"):
        straight = [line.get(key) for line in metric_lines(done)]
        assert [line.get(key) for line in metric_lines(stopped)] == straight, key
    for path in (done, stopped):
        table = [line.split(",") for line in (path / "losses.csv").read_text().splitlines()]
        losses = [(line["step"], line["train/loss"]) for line in metric_lines(path)]
        assert [(int(step), float(loss)) for step, loss in table] == losses
    straight = saved(done, 6)
    resumed = saved(stopped, 6)
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.slow
def test_the_evaluation_is_that_of_the_weights_as_they_are_loaded(done, capsys):
    """By its own formula on logits of `from_pretrained`, inside of training and afterwards."""
    model, params = vit_jax.from_pretrained("run")
    config = configs.load("my_config.py")
    items = importlib.import_module("my_data").Stripes("val", config)
    images, labels = zip(*(items[i] for i in range(len(items))), strict=True)
    image = np.stack(images).astype(np.float32) / 127.5 - 1
    logits = np.asarray(model.apply({"params": params}, image), np.float64)
    probability = scipy.special.softmax(logits, axis=1)
    confidence = probability.max(1)
    which = np.ceil(confidence * 10)  # bins are open below, which no number here shows
    ece = 0.0
    for i in range(1, 11):
        rows = which == i
        if rows.any():
            correct = probability[rows].argmax(1) == np.asarray(labels)[rows]
            ece += rows.mean() * abs(correct.mean() - confidence[rows].mean())
    lines = metric_lines(done)
    assert [line["step"] for line in lines if "eval/val/ece" in line] == [3, 6]
    assert lines[-1]["eval/val/ece"] == pytest.approx(ece, rel=1e-5)
    code = """
def get_config():
    evals = dict(val=dict(type="my_evaluation:calibration", data=dict(split="val")))
    evals["near"] = dict(type="my_near:gap", data=dict(split="val[:50%]", train_split="train"))
    data = dict(name="my_data:Stripes", batch_size=96)
    return dict(image_size=0, data=data, evals=evals, user=dict(stripe_noise=40.0))
"""
    (done.parent / "afterwards.py").write_text(code)
    code = "def gap(features, label, train_features, train_label, num_classes, settings):\n"
    code += "    split = len(label) == 150 and len(train_label) == 300 and settings.every == 0\n"
    code += "    return dict(split=split, width=features.shape[1], classes=num_classes)\n"
    (done.parent / "my_near.py").write_text(code)
    arguments = ["--config=afterwards.py", "--config.init_from=run", "--json=out.json"]
    assert evaluate.main(arguments) == 0
    measured = json.loads((done.parent / "out.json").read_text())
    assert measured["eval/val/ece"] == pytest.approx(lines[-1]["eval/val/ece"], rel=1e-6)
    assert [measured[f"eval/near/{name}"] for name in ("split", "width", "classes")] == [1, 16, 2]
    weights = vit_jax.weights.load.read("run")
    assert weights.class_names == ("horizontal", "vertical")
    features = np.asarray(vit_jax.features(model, params, image))
    kernel, bias = params["head"]["kernel"], params["head"]["bias"]
    assert np.abs(features @ kernel + bias - logits).max() < 1e-5
    again, fresh = vit_jax.from_pretrained("run", num_classes=5)
    assert again.apply({"params": fresh}, image[:2]).tolist() == [[0.0] * 5] * 2
    assert "model my_model:ConvNet of your own" in convert.obstacles(weights, model, "timm")[0]
    assert convert.obstacles(weights, model, "ours") == []
    from PIL import Image

    Image.fromarray(images[0]).save("stripes.png")
    assert predict.main(["--checkpoint=run", "stripes.png"]) == 0
    chosen = weights.class_names[int(logits[0].argmax())]
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"stripes.png: {chosen} {probability[0].max():.1%}")


@pytest.mark.slow
def test_fine_tuning_takes_the_model_of_the_weights(done):
    code = "def get_config():\n    evals = dict(test=dict(data=dict(name='digits')))\n"
    code += "    data = dict(name='digits', batch_size=32)\n"
    code += (
        "    return dict(total_steps=2, image_size=16, init_from='run', data=data, evals=evals)\n"
    )
    (done.parent / "tune.py").write_text(code)
    experiment = Experiment.declared(configs.load("tune.py"))
    before = json.loads(experiment.meta["model"]["settings"])
    assert experiment.model.architecture == "my_model:ConvNet" and before["user"]["gamma"] == 2.0
    assert experiment.config.model.variant == "my_model:ConvNet"
    assert experiment.abstract_state.params["head"]["kernel"].shape == (16, 10)
    weights = vit_jax.weights.load.read("run")
    params = adapt.adapt(weights, experiment.model, True)
    assert not params["head"]["kernel"].any()
    assert np.array_equal(params["Conv_0"]["kernel"], saved(done, 6)["Conv_0/kernel"])


def test_a_transformation_of_optax_needs_no_file(folder):
    arguments = ["--config.optim.name=optax:scale_by_lion", "--config.optim.frozen=Conv_0/.*"]
    experiment = Experiment.declared(configs.load("my_config.py", arguments))
    state = flatten(dict(opt=experiment.abstract_state.opt_state))
    assert any(name.endswith("mu/Conv_1/kernel") for name in state)
    assert not any("Conv_0" in name for name in state), "frozen parameters have no state"
    with pytest.raises(
        UserError, match=r"adamw has the parameter 'learning_rate', but it can have"
    ):
        Experiment.declared(configs.load("my_config.py", ["--config.optim.name=optax:adamw"]))


def test_the_data_commands_take_a_data_set_of_the_users_own(folder, capsys):
    assert data.main(["show", "--config=my_config.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 33 and "my_data:Stripes train number" in lines[1]
    assert data.main(["prepare", "--config=my_config.py"]) == 2
    assert "my_data:Stripes is read where it is and needs no preparation" in last_error(capsys)


def test_runs_of_versions_without_these_keys_continue(folder):
    config = configs.load("my_config.py", ["--config.data.augment=()"])
    before = configs.to_json(config)
    del before["data"]["augment"]
    assert workdir.differences(config, before) == []
    changed = configs.load("my_config.py")
    (line,) = workdir.differences(changed, before)
    assert line == "data.augment: (unset) -> ('my_augmentation:noise',)"


@pytest.mark.slow
def test_what_is_recorded_decides_whether_a_run_continues(done, capsys):
    record = json.loads((done / "config.json").read_text())
    assert record["config"]["loss"] == "my_loss:focal" and record["config"]["user"]["gamma"] == 2.0
    assert record["data_fingerprint"] == "stripes, noise 40.0"
    arguments = ["--config=my_config.py", "--workdir=run", *STEPS]
    assert train.main([*arguments, "--config.user.gamma=3"]) == 2
    assert "user.gamma: 2.0 -> 3.0" in last_error(capsys)
    assert train.main([*arguments, "--config.user.more.depth=3"]) == 2
    assert "user.more.depth: (unset) -> 3" in last_error(capsys)


# --- an objective ---


def pretrain(workdir, *arguments: str) -> int:
    return train.main(["--config=my_pretraining.py", f"--workdir={workdir}", *STEPS, *arguments])


@pytest.mark.slow
def test_an_objective_of_the_users_own_trains_continues_and_is_loaded_without_its_code(
    folder, tmp_path, monkeypatch
):
    assert pretrain("turns") == 0
    lines = metric_lines(folder / "turns")
    assert lines[0]["train/loss"] == pytest.approx(np.log(4), rel=1e-5)
    assert lines[-1]["train/loss"] < np.log(4) and 0 < lines[-1]["train/top1"] <= 1
    assert "eval/val/knn" in lines[2]
    stop = lambda self, step: 1 / 0 if step == 5 else None  # noqa: E731
    monkeypatch.setattr(ProfilerWindow, "before_step", stop)
    with pytest.raises(ZeroDivisionError):
        pretrain("turns_again")
    monkeypatch.undo()
    assert pretrain("turns_again") == 0
    again = metric_lines(folder / "turns_again")
    assert [line["train/loss"] for line in again] == [line["train/loss"] for line in lines]
    params = saved(folder / "turns", 6)
    resumed = saved(folder / "turns_again", 6)
    assert all(np.array_equal(params[name], resumed[name]) for name in params)
    assert params["turns/kernel"].any() and not params["head/kernel"].any()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "my_objective", None)
    model, loaded = vit_jax.from_pretrained(folder / "turns")
    assert "turns" not in loaded and model.num_classes == 10
    assert np.array_equal(loaded["embedding"]["kernel"], params["embedding/kernel"])


@pytest.mark.slow
def test_an_objective_of_the_users_own_needs_no_labels_if_the_config_says_so(folder):
    (folder / "photos").mkdir()
    for number in range(32):
        pixels = np.full((16, 16, 3), 8 * number, np.uint8)
        Image.fromarray(pixels).save(folder / f"photos/{number}.png")
    flags = ["--config.data.name=folder:photos", "--config.evals={}", "--config.model.depth=1"]
    assert pretrain("labelled", *flags) == 2
    flags.append("--config.data.unlabelled=True")
    assert pretrain("unlabelled", *flags, "--config.total_steps=2") == 0
    params = saved(folder / "unlabelled", 2)
    assert params["turns/kernel"].any() and "head/kernel" not in params
    with pytest.raises(
        UserError, match=r"mixup=0\.5 has no effect with objective=my_objective:Rot"
    ):
        configs.load("my_pretraining.py", [*flags, "--config.mixup=0.5"])
    with pytest.raises(UserError, match="unlabelled=True is for an objective of your own"):
        configs.load("my_pretraining.py", [*flags, "--config.objective=mae"])


BAD_OBJECTIVES = """
import jax.numpy as jnp
from vit_jax.train.objectives.objective import Objective

def nothing(model):
    return None

class Mean(Objective):
    def loss(self, params, batch, key, step):
        return batch["image"].mean(), {}

class Alone(Objective):
    def loss(self, params, batch, key, step):
        return batch["image"].mean((1, 2, 3))

class Metric(Objective):
    def loss(self, params, batch, key, step):
        return batch["image"].mean((1, 2, 3)), dict(size=jnp.ones(()))

class Broken(Objective):
    def loss(self, params, batch, key, step):
        return batch["pixels"], {}

class Unnamed(Mean):
    def init(self, seed):
        return super().init(seed) | dict(more=jnp.ones(()))

class Missing(Mean):
    extra = ("more",)

class Changed(Mean):
    def init(self, seed):
        return super().init(seed) | dict(cls=jnp.ones(()))

class Teaches(Mean):
    teaches = True

class Kept(Teaches):
    def running(self):
        return dict(center=jnp.zeros(3))

    def teach(self, state, batch):
        return {}

    def targets(self, answers, batch, state):
        return answers, dict(center=jnp.zeros(4)), {}

class Watched(Kept):
    def targets(self, answers, batch, state):
        return answers, state.running, dict(size=batch["mask"])

class Draws(Objective):
    draws = ("image",)

    def loss(self, params, batch, key, step):
        return batch["mask"], {}

class Drawn(Draws):
    def pictures(self, params, batch):
        return (batch["image"].mean(-1),)
"""
BAD = {
    "nothing": "gives a NoneType, but it must give a subclass of",
    "Mean": r"returns float32 \[\] as 'loss' in `loss` for 4 images, but it must return float32 \[ba",
    "Alone": "in `loss`, but it must return the pair",
    "Metric": r"returns float32 \[\] as 'size' in `loss`",
    "Broken": "fails, bad_objectives.py:22: KeyError: 'pixels'",
    "Unnamed": "differs in 'more': `extra` must name exactly what `init` adds",
    "Missing": "differs in 'more': `extra` must name",
    "Changed": "changes the shapes of the model's parameters",
    "Teaches": "fails, .*NotImplementedError: an objective that `teaches` defines `teach`",
    "Kept": "returns in `targets` other arrays than those of `running`",
    "Watched": r"returns float32 \[4\] as 'size' in `targets`, but it must return one number",
    "Draws": "fails, .*NotImplementedError: an objective that names `draws` defines `pictures`",
    "Drawn": r"returns float32 \[4, 16, 16\] in `pictures` for 4 images, but it must return a tuple",
}


def test_an_objective_that_does_not_fit_is_one_line_before_anything_runs(folder):
    (folder / "bad_objectives.py").write_text(BAD_OBJECTIVES)
    for name, message in BAD.items():
        flags = [f"--config.objective=bad_objectives:{name}", "--config.model.depth=1"]
        flags += ["--config.pictures_every=1"]
        with pytest.raises(UserError, match=message):
            Experiment.declared(configs.load("my_pretraining.py", flags))


BAD_PARTS = """
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

VALUE = 3

def mean_loss(logits, label):
    return jnp.mean(logits)

def other_loss(logits, targets):
    return logits.sum(-1)

def broken_loss(logits, label):
    return logit.sum(-1)

def adamw(config):
    return optax.adamw(config.optim.lr)

def none(**arguments):
    return None

def keyed():
    def init(params):
        return jax.random.key(0)
    return optax.GradientTransformation(init, lambda updates, state, params: (updates, state))

def with_if(total_steps):
    return lambda step: 0.1 if step < 10 else 0.01

def many(total_steps):
    return lambda step: jnp.ones(2) * step

def image_only(image):
    return image

def smaller(image, label):
    return image[:, ::2], label

def as_bytes(image, label):
    return image.astype(jnp.uint8), label

def lists(logits, label):
    return dict(recall=[0.1, 0.2])

def fails(label):
    return dict(x=1 / 0)

def named(logits):
    return dict(good=1.0)

class Wide(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(7, name="head")(x.mean((1, 2)))

class Headless(nn.Module):
    num_classes: int
    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(x.mean((1, 2)))

class Late(nn.Module):
    num_classes: int
    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes, name="head")(x).mean((1, 2))

class Normed(nn.Module):
    num_classes: int
    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(nn.BatchNorm(use_running_average=False)(x).mean((1, 2)))

def nothing(label):
    pass

def grey(split):
    return Items((np.zeros((8, 8), np.uint8), 0))

def floats(split):
    return Items((np.zeros((8, 8, 3)), 0))

def texts(split):
    return Items((b"image", "cat"))

def alone(split):
    return Items(b"image")

def unnamed(split):
    return [(b"image", 0)]

def nameless(split):
    items = Items((b"image", 0))
    items.class_names = None
    items.num_classes = "two"
    return items

def letters(split):
    items = Items((b"image", 0))
    items.class_names = "ab"
    return items

class Items:
    num_classes = 2
    def __init__(self, item):
        self.item = item
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return self.item
"""
EVAL = "--config.evals.val.type"
UNFIT = {
    "--config.loss=bad_parts:mean_loss": r"loss=bad_parts:mean_loss returns float32 \[\] for logits and label of \(3, 2\), but it must return float32 \[batch\]",
    "--config.loss=bad_parts:other_loss": "loss=bad_parts:other_loss has the parameter 'targets', but it can have logits, label, config alone",
    "--config.loss=bad_parts:broken_loss": r"fails, bad_parts.py:17: NameError: name 'logit' is not defined",
    "--config.loss=bad_parts:mean_los": "bad_parts has no 'mean_los', did you mean mean_loss",
    "--config.loss=bad_parts:VALUE": "VALUE is a int: name a function",
    "--config.loss=bad_part:f": r"no module 'bad_part' in /\S+, in the folder of the config file, or installed",
    "--config.loss=bad_import:f": "can't be imported, bad_import.py:2: ModuleNotFoundError: No module named 'no_such'",
    "--config.loss=bad_syntax:f": r"can't be imported, bad_syntax.py:1: SyntaxError: invalid syntax",
    "--config.loss=bad_exit:f": "can't be imported, bad_exit.py:1: SystemExit",
    "--config.optim.name=bad_parts:adamw": r"optim.name=bad_parts:adamw steps against the gradient, .* optax.scale_by_lion\(\)",
    "--config.optim.name=bad_parts:none": "returns a NoneType, but it must return an optax.GradientTransformation",
    "--config.optim.name=bad_parts:keyed": "has a key of jax.random.key in its state",
    "--config.optim.schedule=bad_parts:none": "returns a NoneType, but it must return a function of the step",
    "--config.optim.schedule=bad_parts:with_if": r"optim.schedule=bad_parts:with_if fails, bad_parts.py:31: TracerBoolConversionError",
    "--config.optim.schedule=bad_parts:many": r"gives float32 \[2\] for a step, but it must give one number",
    "--config.data.augment=bad_parts:image_only": r"returns float32 \[32, 16, 16, 3\], but it must return the pair",
    "--config.data.augment=bad_parts:smaller": r"returns image as float32 \[32, 8, 16, 3\], but it must be as it was given, float32 \[32, 16",
    "--config.data.augment=bad_parts:as_bytes": r"returns image as uint8",
    f"{EVAL}=bad_parts:nothing": "evals.val.type=bad_parts:nothing returns a NoneType, but it must return a dict of numbers",
    f"{EVAL}=bad_parts:lists": "returns 'recall': a list in its dict",
    f"{EVAL}=bad_parts:fails": "fails, bad_parts.py:49: ZeroDivisionError",
    "--config.model.variant=bad_parts:none": "model.variant=bad_parts:none gives a NoneType, but it must give a Flax module",
    "--config.model.variant=bad_parts:Wide": r"returns float32 \[2, 7\] for images \[2, 16, 16, 3\], but it must return logits \[2, 2\]",
    "--config.model.variant=bad_parts:Headless": "has no layer named 'head': name the last one so",
    "--config.model.variant=bad_parts:Late": r"its layer 'head' an input of shape \[1, 16, 16, 3\]",
    "--config.model.variant=bad_parts:Normed": "has variables of the kind 'batch_stats', .* use GroupNorm",
    "--config.data.name=bad_parts:none": "gives a NoneType for split 'train', but it must give a sequence",
    "--config.data.name=bad_parts:grey": r"gives uint8 \[8, 8\] as the image of bad_parts:grey train number 0",
    "--config.data.name=bad_parts:floats": r"gives float64 \[8, 8, 3\] as the image",
    "--config.data.name=bad_parts:texts": "gives 'cat' as the label",
    "--config.data.name=bad_parts:alone": r"gives a bytes as bad_parts:alone train number 0, but it must give a pair",
    "--config.data.name=bad_parts:unnamed": "has neither class_names nor num_classes",
    "--config.data.name=bad_parts:nameless": "has num_classes 'two', but it must be a number",
    "--config.data.name=bad_parts:letters": "has class_names 'ab', but it must be a sequence of names",
    "--config.data.split=trai": r"data.name=my_data:Stripes fails, my_data.py:\d+: KeyError: 'trai'",
    "--config.data.split=train+val": r"split 'train\+val' of my_data:Stripes has several parts",
    f"{EVAL}=bad_parts:named --config.checkpoint.keep_best=eval/val/top1": "keep_best='eval/val/top1' is not a metric of evals: bad_parts:named has eval/val/good",
}  # fmt: skip


@pytest.fixture(scope="module")
def bad(folder):
    (folder / "bad_parts.py").write_text(BAD_PARTS)
    (folder / "bad_import.py").write_text("import os\nimport no_such\n")
    (folder / "bad_syntax.py").write_text("def f(:\n")
    (folder / "bad_exit.py").write_text("raise SystemExit(3)\n")


@pytest.mark.parametrize("arguments", UNFIT)
def test_what_does_not_fit_is_one_line_before_anything_runs(arguments, bad):
    with pytest.raises(UserError, match=UNFIT[arguments]) as caught:
        Experiment.declared(configs.load("my_config.py", arguments.split()))
    assert "\n" not in str(caught.value)


def test_a_dry_run_ends_with_the_line_and_debug_shows_the_traceback(bad, capsys):
    arguments = ["--config=my_config.py", "--dry_run", "--config.loss=bad_parts:broken_loss"]
    assert train.main(arguments) == 2
    assert "bad_parts.py:17: NameError" in last_error(capsys)
    with pytest.raises(UserError) as caught:
        train.main([*arguments, "--debug"])
    assert isinstance(caught.value.__cause__, NameError)


def test_a_name_that_is_neither_a_choice_nor_a_part_is_named(folder):
    for value in ("focal", "folder:focal", "my-loss:focal", "my_loss:", ":focal", "a:b:c"):
        with pytest.raises(UserError, match=r"loss='.*' is not one of .*, or MODULE:FUNCTION of"):
            configs.load("my_config.py", [f"--config.loss={value}"])
    with pytest.raises(UserError, match=r"data\.augment has 'noise', which is not MODULE:FUNC"):
        configs.load("my_config.py", ["--config.data.augment=noise"])


def test_a_part_is_found_beside_the_config_too(folder, tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/bad_beside.py").write_text(BAD_PARTS)
    config = FILES["my_config.py"].replace("my_loss:focal", "bad_beside:mean_loss")
    (tmp_path / "configs/c.py").write_text(config)
    with pytest.raises(UserError, match=r"bad_beside:mean_loss returns float32 \[\]"):
        Experiment.declared(configs.load(f"{tmp_path}/configs/c.py"))


def test_two_modules_of_one_name_beside_two_configs_are_an_error(folder, tmp_path):
    for name in ("e1", "e2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bad_twice.py").write_text("def loss(logits):\n    return logits\n")
        code = "def get_config():\n    return dict(total_steps=1, loss='bad_twice:loss')\n"
        (tmp_path / name / "c.py").write_text(code)
    places = list(sys.path)
    configs.load(f"{tmp_path}/e1/c.py")
    configs.load(f"{tmp_path}/e1/c.py")
    with pytest.raises(
        UserError, match=r"bad_twice is \S+e2/bad_twice.py, but .*/e1/bad_twice.py: rename"
    ):
        configs.load(f"{tmp_path}/e2/c.py")
    assert sys.path == [*places, f"{tmp_path}/e1"]


def test_an_optimizer_may_use_the_shapes_of_parameters(folder):
    code = "import jax\nimport optax\n\ndef like(params):\n"
    code += "    def update(updates, state, now=None):\n"
    code += "        flat = jax.tree.map(lambda u, p: u.reshape(p.shape), updates, params)\n"
    code += "        return flat, state\n"
    code += "    return optax.GradientTransformation(lambda tree: (), update)\n"
    (folder / "my_like.py").write_text(code)
    one = Experiment.declared(configs.load("my_config.py", ["--config.optim.name=my_like:like"]))
    params = one.abstract_state.params
    updates, _ = jax.eval_shape(one.tx.update, params, one.abstract_state.opt_state, params)
    shapes = [jax.tree.map(lambda leaf: leaf.shape, tree) for tree in (updates, params)]
    assert shapes[0] == shapes[1]


def test_an_evaluation_may_be_for_images_with_several_labels(folder):
    code = "def sets(logits, label):\n    assert label.shape[1] == 4 and (label == -1).any()\n"
    code += "    return dict(hit=(label == logits.argmax(1)[:, None]).any(1).mean())\n"
    (folder / "my_sets.py").write_text(code)
    config = configs.load("my_config.py", ["--config.evals.val.type=my_sets:sets"])
    model = types.SimpleNamespace(num_classes=5, width=8)
    own.check(config, model, 4)
    config = configs.load("my_config.py")
    own.check(config, model)
    with pytest.raises(UserError, match="my_evaluation:calibration fails"):
        own.check(config, model, 4)
    label = own.several(np.arange(6) % 5, 5, 3)
    assert label.tolist()[:4] == [[0, -1, -1], [1, 2, -1], [2, 3, 4], [3, -1, -1]]


def test_keys_of_all_choices_may_be_read_by_a_part(folder):
    config = configs.load(
        "my_config.py", ["--config.optim.power=2", "--config.evals.val.shots=(1,)"]
    )
    assert config.optim.b2 == 0.99 and config.optim.power == 2.0 and config.optim.momentum == 0.9
    with pytest.raises(UserError, match=r"optim\.power .* has no effect with optim\.schedule=cosi"):
        configs.load("my_config.py", ["--config.optim.schedule=cosine", "--config.optim.power=2"])


def test_keys_of_the_users_own_take_any_value_that_json_holds(tmp_path):
    path = tmp_path / "c.py"
    path.write_text(
        "def get_config():\n    return dict(user=dict(a=dict(b=1, c=[1, (2,)]), d=None))\n"
    )
    config = configs.load(str(path), ["--config.user.a.b=3.5", "--config.user.e.f=0.5"])
    assert (config.user.a.b, config.user.a.c, config.user.d) == (3.5, (1, (2,)), None)
    assert config.user.e.f == 0.5
    typed = {"x": "x", "true": True, "1e-3": 1e-3, "(1,'a')": (1, "a"), "a:b": "a:b"}
    for text, value in typed.items():
        assert configs.load(str(path), [f"--config.user.g={text}"]).user.g == value
    assert configs.load(str(path), ["--config.user.g=None"]).user.g is None
    path.write_text(path.read_text().replace("d=None", "d='3'"))
    assert configs.load(str(path), ["--config.user.d=4"]).user.d == "4", "as in the file"
    wrong = {
        "--config.user.a=3": "user.a is a group of keys",
        "--config.user.d.e=3": "user.d.e is below d, which is a value",
        "--config.user.g": "write --config.user.g=VALUE",
        "--config.user.g={1}": "user.g has a set, which JSON can't hold",
        "--config.usr.g=1": "config key usr.g is unknown",
    }
    for argument, message in wrong.items():
        with pytest.raises(UserError, match=message):
            configs.load(str(path), [argument])


# --- models that checkpoints name ---


@pytest.mark.parametrize(
    "name", ["logging.config:dictConfig", "os:system", "json:loads", "sys:exit"]
)
def test_a_checkpoint_can_not_name_code_of_installed_modules(name, folder):
    with pytest.raises(UserError, match=r"not in the current folder.*VIT_JAX_OWN_MODELS="):
        create.create(None, 10, 16, architecture=name)


@pytest.mark.parametrize("has_init", [False, True])
def test_a_downloaded_folder_does_not_trust_itself(has_init, folder, monkeypatch):
    """Also if it is unpacked in the current folder."""
    name = f"bad_{has_init}"
    (folder / name).mkdir()
    (folder / f"{name}/evil.py").write_text("raise SystemExit('it ran')\n")
    (folder / f"{name}.py").write_text("")  # which a package comes before
    if has_init:
        (folder / f"{name}/__init__.py").write_text("raise SystemExit('it ran')\n")
        monkeypatch.setattr(sys, "path", [path for path in sys.path if path != os.getcwd()])
    for architecture in (f"{name}.evil:Model", f"{name}:Model")[: 1 + has_init]:
        with pytest.raises(UserError, match=r"not in the current folder.*VIT_JAX_OWN_MODELS="):
            create.create(None, 10, 16, architecture=architecture)


def test_a_model_of_a_checkpoint_is_defined_in_the_module_that_it_names(folder):
    (folder / "bad_links.py").write_text("from logging.config import dictConfig\n")
    with pytest.raises(UserError, match="which is not defined in this module"):
        create.create(None, 10, 16, architecture="bad_links:dictConfig")


@pytest.mark.slow
def test_a_checkpoint_can_not_name_a_model_as_the_user_does(done, monkeypatch):
    """A variant, which only a config or a program gives, is built without a question."""
    meta = checkpoint.read_meta(checkpoint.find(done))
    meta["model"]["variant"] = "os:getcwd"
    monkeypatch.setattr(checkpoint, "read_meta", lambda folder: meta)
    with pytest.raises(UserError, match="meta is damaged"):
        vit_jax.from_pretrained(done)
    assert "os:getcwd" not in own_parts.named


@pytest.mark.slow
def test_weights_of_a_model_elsewhere_need_the_users_word(done, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own_parts, "named", {})
    with pytest.raises(UserError, match=r"my_model:ConvNet, and my_model is not in the current fo"):
        vit_jax.from_pretrained(done)
    monkeypatch.setenv("VIT_JAX_OWN_MODELS", "other,my_model")
    assert vit_jax.from_pretrained(done)[0].num_classes == 2
    monkeypatch.setattr(own_parts, "named", {})
    monkeypatch.delenv("VIT_JAX_OWN_MODELS")
    user = dict(widths=(8, 16))
    model = vit_jax.create_model("my_model:ConvNet", num_classes=2, image_size=16, user=user)
    assert vit_jax.from_pretrained(done)[0].flops == model.flops


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("S/16", "R+Ti/16", "R50x1")]


@pytest.mark.parametrize("variant", ["Mixer-S/32", *SLOW])
def test_flops_of_any_function_are_those_that_our_models_declare(variant):
    model = vit_jax.create_model(variant, num_classes=10, image_size=96)
    image = jax.ShapeDtypeStruct((1, 96, 96, 3), np.float32)
    params = {"params": create.abstract_params(model)}
    assert flops.count_flops(model.portable().apply, params, image) == model.flops
    if model.can_stack:
        stacked = model.with_scan(True)
        params = {"params": create.abstract_params(stacked)}
        assert flops.count_flops(stacked.portable().apply, params, image) == model.flops


def test_a_model_of_ours_as_a_part_is_the_same_model(folder):
    code = "import vit_jax\n\ndef vit(num_classes, image_size, config):\n"
    code += "    sizes = dict(width=32, depth=config.model.depth, mlp_dim=64, num_heads=2)\n"
    code += '    return vit_jax.create_model("Ti/4", num_classes, image_size, **sizes)\n'
    (folder / "my_vit.py").write_text(code)
    mine = vit_jax.create_model("my_vit:vit", num_classes=5, image_size=16, depth=1)
    sizes = dict(width=32, depth=1, mlp_dim=64, num_heads=2)
    ours = vit_jax.create_model("Ti/4", num_classes=5, image_size=16, **sizes)
    rng = np.random.default_rng(0)
    image = rng.standard_normal((2, 16, 16, 3), np.float32)
    shapes = create.abstract_params(ours)
    assert shapes == create.abstract_params(mine)
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), shapes)
    assert mine.flops == ours.flops and mine.width == 32
    headless = {name: leaf for name, leaf in params.items() if name != "head"}
    features = [applied(model.clone(num_classes=0), headless, image) for model in (mine, ours)]
    assert np.array_equal(*features)
    with pytest.raises(UserError, match="unknown model field 'depht' of a model of your own"):
        vit_jax.create_model("my_vit:vit", depht=2)


def test_optimizer_states_of_any_kind_are_split_by_the_names_of_parameters(folder):
    code = "import optax\n\ndef both(params):\n"
    code += "    labels = {name: name for name in params}\n"
    code += "    parts = {name: optax.scale_by_adam() for name in params}\n"
    code += "    return optax.partition(parts | dict(head=optax.scale_by_adafactor()), labels)\n"
    code = code.replace("scale_by_adafactor", "scale_by_factored_rms")
    (folder / "my_both.py").write_text(code)
    widths = "--config.user.widths=(64,512)"
    arguments = ["--config.optim.name=my_both:both", widths, "--config.mesh.fsdp=2"]
    experiment = Experiment.on_devices(configs.load("my_config.py", arguments), jax.devices()[:2])
    state = flatten(dict(opt=experiment.abstract_state.opt_state))
    split = {name: leaf for name, leaf in state.items() if any(leaf.sharding.spec)}
    assert any("mu" in name and "Conv_1/kernel" in name for name in split)
    assert isinstance(experiment.tx, optax.GradientTransformation)


def test_all_processes_must_have_the_same_files(folder):
    own_parts.check(configs.load("my_config.py"))
    before = own_parts.code()
    assert {"code of my_loss:focal", "code of my_data:Stripes"} <= before.keys()
    with (folder / "my_loss.py").open("a") as file:
        file.write("# changed\n")
    after = own_parts.code()
    assert [name for name in before if before[name] != after[name]] == ["code of my_loss:focal"]


def test_all_files_of_a_package_must_be_the_same(folder):
    (folder / "bad_package").mkdir()
    (folder / "bad_package/__init__.py").write_text("")
    (folder / "bad_package/part.py").write_text("def loss(logits):\n    return logits\n")
    own_parts.find("config key loss", "bad_package.part:loss")
    before = own_parts.code()["code of bad_package.part:loss"]
    (folder / "bad_package/used.py").write_text("")
    assert own_parts.code()["code of bad_package.part:loss"] != before


def test_a_mixture_takes_data_sets_of_the_users_own(folder):
    mixture = (("my_data:Stripes@train[:10%]", 1.0), ("my_data:Stripes@val", 3.0))
    arguments = ["--config.data.name=mixture", f"--config.data.mixture={mixture}"]
    arguments += ["--config.evals.val.data.name=my_data:Stripes"]
    config = configs.load("my_config.py", arguments)
    source = sources.open_training(config.data, config.user)
    assert len(source) == 330 and source.class_names == ("horizontal", "vertical")
    items = importlib.import_module("my_data").Stripes("val", config)
    assert source.example(30)[1] == items[0][1] and source.labels()[31] == items[1][1]
    assert Experiment.declared(config).facts.num_examples == 330


def test_the_command_finds_parts_in_the_current_folder(folder):
    """`vit_jax` does not put it on the path of Python, as `python -m` does."""
    here = os.getcwd()
    before = [place for place in sys.path if place not in ("", here)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", before)
        sys.modules.pop("my_optimizer", None)
        assert callable(own_parts.find("optim.name", "my_optimizer:lion"))
        assert before[0] == here
