"""Loss spikes: what is found, where a run goes back to, and that it continues with the right bits,
whenever it is stopped.
"""

import csv
import json
import pathlib
import shutil
import statistics
import types

import jax
import numpy as np
import pytest
from conftest import metric_lines
from PIL import Image
from test_train import final_params, same_bits

from vit_jax import config as configs
from vit_jax.checkpoints import manager
from vit_jax.data import __main__ as data_command
from vit_jax.data import order, pipeline, to_device
from vit_jax.data.left_out import LeftOut, Part
from vit_jax.data.sources import catalog
from vit_jax.data.sources import open as sources
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import preemption
from vit_jax.errors import NegativeResult, UserError
from vit_jax.train import __main__ as train
from vit_jax.train import loop, metrics, spikes
from vit_jax.train import state as states
from vit_jax.train.experiment import Experiment
from vit_jax.weights import scan_layout

# --- what a spike is ---


def brute_force(losses: list[float], factor: float, steps: int, window: int) -> list[int]:
    """The updates at which a spike is complete, by its definition; nothing is kept between them."""
    high = []
    for number in range(len(losses)):
        normal = [
            x for x, is_high in zip(losses, high, strict=False) if np.isfinite(x) and not is_high
        ]
        median = statistics.median(normal[-window:]) if len(normal) >= window else np.inf
        high.append(bool(np.isfinite(losses[number]) and losses[number] > factor * median))
    ends = []
    for number in range(1, len(losses) + 1):
        finite = [h for x, h in zip(losses[:number], high, strict=False) if np.isfinite(x)]
        if np.isfinite(losses[number - 1]) and len(finite) >= steps and all(finite[-steps:]):
            ends.append(number)
    return ends


@pytest.mark.parametrize("seed", range(30))
def test_spikes_are_found_as_they_are_defined(seed):
    rng = np.random.default_rng(seed)
    window = int(rng.integers(1, 12))
    steps = int(rng.integers(1, 5))
    losses = rng.lognormal(0, 0.3, 200) * np.linspace(3, 1, 200)
    for start in rng.integers(0, 200, 6):
        losses[start : start + rng.integers(1, 8)] *= rng.choice([1.5, 4])
    losses[190:] *= 9
    losses[rng.integers(0, 200, 10)] = rng.choice([np.nan, np.inf], 10)
    detector = spikes.Detector(1.8, steps, window)
    found = [number for number, loss in enumerate(losses, 1) if detector.add(number, loss)]
    assert found == brute_force(losses.tolist(), 1.8, steps, window)
    assert found


def test_spikes_of_a_loss_that_is_negative():
    """A factor of 1.5 of a median of -2 is -1."""
    detector = spikes.Detector(1.5, 3, 50)
    losses = [*(np.random.default_rng(0).normal(-2, 0.1, 200)), -0.9, -0.8, -0.9]
    found = [number for number, loss in enumerate(losses, 1) if detector.add(number, loss)]
    assert found == [203]


@pytest.mark.parametrize("seed", range(20))
def test_a_step_reads_the_batch_after_those_that_were_left_out(seed):
    """Against a list of batches, in which what comes after a step is replaced when a run goes back
    there.
    """
    rng = np.random.default_rng(seed)
    left_out = LeftOut()
    batches = list(range(1000))
    for _ in range(rng.integers(1, 6)):
        step = int(rng.integers(0, 300))
        detected = step + int(rng.integers(1, 50))
        left_out.parts.append(
            Part(step + 1, detected, step, (batches[step], batches[detected - 1]))
        )
        batches[step:] = batches[detected:]
    assert [left_out.batch_of(step) for step in range(400)] == batches[:400]
    assert LeftOut.from_json(json.loads(json.dumps(left_out.to_json()))).parts == left_out.parts


def test_a_checkpoint_to_go_back_to():
    assert manager.newest_before([10, 20, 27, 30], 10, 29) == 20, "27 was saved by a preemption"
    assert manager.newest_before([20, 30, 33], 10, 15) == 20, "the oldest, if all are late"
    assert manager.newest_before([27, 33], 10, 40) is None


@pytest.mark.parametrize(("keep_last", "reach"), [(1, 7), (2, 25), (3, 4)])
def test_a_checkpoint_within_reach_is_kept_however_often_a_run_is_stopped(
    keep_last, reach, tmp_path
):
    """Those of preemptions push none out that an undisturbed run would have."""
    config = configs.defaults().checkpoint
    config.every = 10
    config.keep_last = keep_last
    periodic = []
    with manager.Checkpointer(tmp_path, config, reach) as checkpointer:
        for step in (10, 14, 15, 20, 30, 33, 34, 36, 40, 41, 50):
            checkpointer.save(step, {"x": np.float32(step)}, {}, {})
            periodic += [step] * (step % 10 == 0)
            early = [s for s in periodic if s <= step - reach]
            assert max(early, default=10) in checkpointer.steps()


class Saved:
    """Stands in for the checkpointer."""

    def __init__(self, *numbers: int):
        self.numbers = numbers

    def steps(self) -> list[int]:
        return list(self.numbers)


def watcher(tmp_path, *checkpoints: int, **settings) -> spikes.Spikes:
    config = configs.defaults()
    config.checkpoint.every = 10
    config.spikes.update(dict(factor=2.0, steps=3, window=5, margin=0) | settings)
    return spikes.Spikes(config, tmp_path, Saved(*checkpoints))


def watch(found: spikes.Spikes, losses: list[float], first: int = 1) -> list[int]:
    """The updates at which the run would go back."""
    scalars = [{"train/loss": jax.numpy.float32(loss)} for loss in losses]
    return [n for n, scalar in enumerate(scalars, first) if found.watch(n, scalar, wait=False)]


def test_losses_are_read_two_steps_late_and_none_is_lost_by_a_stop(tmp_path):
    losses = [1.0] * 12 + [3.0] * 3 + [1.0] * 5
    straight = watcher(tmp_path, 10)
    assert watch(straight, losses)[0] == 17
    part = Part(spike=13, detected=15, step=10, batches=(10, 14))
    for stop in range(1, 17):
        before = watcher(tmp_path, 10)
        assert watch(before, losses[:stop]) == []
        after = watcher(tmp_path, 10)
        after.resume(json.loads(json.dumps(before.meta()))["spikes"])
        assert watch(after, losses[stop:], stop + 1)[0] == 17
        assert after.part == part


def test_without_a_checkpoint_before_the_spike_the_run_goes_on(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(spikes.log, "warning", lambda form, *args: lines.append(form % args))
    found = watcher(tmp_path, 20)
    assert watch(found, [1.0] * 12 + [3.0] * 9 + [9.0] * 3) == [], "3 is the median then"
    assert len(lines) == 1 and "from step 13 to 15" in lines[0]
    assert lines[0].endswith("there is no checkpoint before that, and the run goes on")


def test_the_same_spike_again_and_again_ends_the_run(tmp_path):
    found = watcher(tmp_path, 10, max_rewinds=2)
    for _ in range(2):
        found.resume(dict(losses=[1.0] * 5))
        assert watch(found, [3.0] * 5, 11) == [15]
        found.go_back()
    assert [part.batches for part in LeftOut.read(tmp_path).parts] == [(10, 12), (13, 15)]
    found.resume(dict(losses=[1.0] * 5))
    with pytest.raises(NegativeResult, match="went back to step 10 or later 2 times: the batches"):
        watch(found, [3.0] * 5, 11)


def test_settings_that_can_have_no_effect_are_refused(tiny):
    with pytest.raises(UserError, match=r"spikes.factor=0.5 calls half of all losses high"):
        configs.load(tiny, ["--config.spikes.factor=0.5"])
    with pytest.raises(UserError, match=r"but checkpoint.every=0"):
        configs.load(tiny, ["--config.spikes.factor=2", "--config.checkpoint.every=0"])


# --- whole runs ---

CONFIG = """
import ml_collections

def get_config(arg=""):
    config = ml_collections.ConfigDict()
    config.total_steps = 40
    config.image_size = 8
    config.log_every = 1
    config.model = dict(variant="Ti/4", width=32, depth=1, mlp_dim=64, num_heads=4, pool="gap",
                        dropout=0.1)
    config.data = dict(name="csv:{csv}", batch_size=16, crop="inception", area_min=0.5)
    config.optim = dict(lr=1e-2, warmup_steps=2, ema_decay=0.9)
    config.checkpoint = dict(every=8)
    config.spikes = dict(factor=4.0, steps=4, window=8, margin=2)
    return config
"""
COLOURS = dict(blue=(0, 0, 250), green=(0, 250, 0), grey=(125, 125, 125), red=(250, 0, 0))
WRONG = (*range(20, 24), *range(40, 44))  # the batches whose labels are wrong
# What each spike leaves out. Update 33 reads batch 40, and checkpoint 32 is too near.
PARTS = [Part(21, 24, 16, (16, 23)), Part(33, 36, 24, (32, 43))]
READ = [*range(16), *range(24, 32), *range(44, 60)]  # the batches that the 40 updates read


def write_csv(path: pathlib.Path, labels: list[str]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "label"))
        writer.writerows((f"{i}.png", label) for i, label in enumerate(labels))


def make_config(folder: pathlib.Path) -> str:
    """Writes a config whose data are images of one colour. Some batches have wrong labels, as if a
    shard of the data were bad.
    """
    rng = np.random.default_rng(0)
    names = list(COLOURS)
    labels = [names[i % 4] for i in range(1024)]
    for i, label in enumerate(labels):
        pixels = COLOURS[label] + rng.integers(0, 6, (8, 8, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    write_csv(folder / "all.csv", labels)
    path = folder / "spikes.py"
    path.write_text(CONFIG.format(csv=folder / "all.csv"))
    config = configs.load(str(path))
    source = sources.open_training(config.data)
    for batch in WRONG:
        for i in order.ids(config, source.parts, batch):
            labels[i] = names[(i + 1) % 4]
    write_csv(folder / "all.csv", labels)
    return str(path)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> str:
    return make_config(tmp_path_factory.mktemp("spikes"))


def run(config_file: str, workdir: pathlib.Path, *arguments: str) -> int:
    return train.main([f"--config={config_file}", f"--workdir={workdir}", *arguments])


def trained_on(config_file: str, batches: list[int]) -> tuple[list[float], dict]:
    """(losses, final averaged parameters) of updates on the given batches, by a loop of its own."""
    config = configs.load(config_file)
    source = sources.open_training(config.data)
    mesh = meshes.make_mesh(config.mesh)
    losses = []
    with jax.set_mesh(mesh):
        experiment = Experiment.build(config, catalog.found(config, source), mesh)
        state = states.fresh_state(experiment)
        rows = np.arange(config.data.batch_size)
        host = pipeline.train_pipeline(config, source, rows, max(batches) + 1)
        wanted = set(batches)
        read = (batch for number, batch in enumerate(host.batches()) if number in wanted)
        for batch in to_device.to_device(read, mesh, rows, config.data.batch_size, prefetch=1):
            state, step_metrics = experiment.train_step(state, batch)
            losses.append(float(step_metrics["train/loss"]))
    return losses, scan_layout.flatten(jax.device_get(state.ema_params))


@pytest.fixture(scope="module")
def done(config_file, tmp_path_factory) -> pathlib.Path:
    """The workdir of an undisturbed run with two spikes."""
    workdir = tmp_path_factory.mktemp("done") / "run"
    assert run(config_file, workdir) == 0
    return workdir


def losses_of(workdir: pathlib.Path) -> list[float]:
    lines = metric_lines(workdir)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["train/loss"] for line in lines]


def assert_same(workdir: pathlib.Path, truth: pathlib.Path) -> None:
    assert losses_of(workdir) == losses_of(truth)
    assert same_bits(final_params(workdir), final_params(truth))
    assert LeftOut.read(workdir).parts == LeftOut.read(truth).parts == PARTS


@pytest.mark.slow
def test_a_run_that_goes_back_is_one_that_never_read_these_batches(config_file, done, tmp_path):
    losses, params = trained_on(config_file, READ)
    assert losses_of(done) == losses
    assert same_bits(final_params(done), params)
    assert LeftOut.read(done).parts == PARTS
    log = (done / "log.txt").read_text()
    assert "from step 21 to 24" in log and "going back to step 16, without batches 16 to 23" in log
    assert "checkpoint 32 is of what was given up, and is deleted" in log

    shown = tmp_path / "shown.json"
    arguments = ["show", f"--config={config_file}", f"--json={shown}", "--step=30"]
    config = configs.load(config_file)
    source = sources.open_training(config.data)
    for more, batch in (([], 30), ([f"--workdir={done}"], 50)):
        assert data_command.main([*arguments, *more]) == 0
        found = json.loads(shown.read_text())
        assert (found["step"], found["batch"]) == (30, batch)
        assert found["ids"] == order.ids(config, source.parts, batch)
    guard = loop.make_guard(
        types.SimpleNamespace(config=config), source, tmp_path, LeftOut.read(done)
    )
    assert guard.ids(31) == order.ids(config, source.parts, 50), "in reports of non-finite updates"


@pytest.mark.slow
def test_a_run_without_spikes_has_the_bits_of_one_that_does_not_look_for_them(
    config_file, tmp_path
):
    for name, factor in (("off", 0), ("on", 1e6)):
        assert run(config_file, tmp_path / name, f"--config.spikes.factor={factor}") == 0
        assert not (tmp_path / name / "left_out.json").exists()
    losses, params = trained_on(config_file, list(range(40)))
    assert losses == losses_of(tmp_path / "off") == losses_of(tmp_path / "on")
    for name in ("off", "on"):
        assert same_bits(params, final_params(tmp_path / name))


@pytest.mark.slow
def test_a_branch_leaves_out_what_its_trunk_left_out(config_file, done, tmp_path):
    branch = f"--config.branch_from={done}/checkpoints/32"
    assert run(config_file, tmp_path / "run", branch) == 0
    lines = metric_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(33, 41))
    assert [line["train/loss"] for line in lines] == losses_of(done)[32:]
    assert LeftOut.read(tmp_path / "run").parts == PARTS


class Killed(BaseException):
    """Nothing catches it."""


def kill_in(patch, owner, name: str, is_here) -> None:
    """Ends the run at a call of `owner.name` if `is_here()`."""
    original = getattr(owner, name)

    def method(*args, **options):
        if is_here():
            raise Killed
        return original(*args, **options)

    patch.setattr(owner, name, method)


def num_parts(workdir: pathlib.Path) -> int:
    return len(LeftOut.read(workdir).parts)


MOMENTS = {
    "before the record": (spikes.Spikes, "go_back", 1),
    "before checkpoints are deleted": (manager.Checkpointer, "delete", 2),
    "before the state is restored": (manager.Checkpointer, "restore", 2),
    "when it trains again": (metrics.MetricWriter, "write", 2),
}


@pytest.mark.slow
def test_a_kill_at_any_moment_of_the_way_back_changes_nothing(config_file, done, tmp_path):
    """One run that is killed again and again on the way back from its second spike."""
    workdir = tmp_path / "run"
    for moment, (owner, name, parts) in MOMENTS.items():
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            kill_in(patch, owner, name, lambda parts=parts: num_parts(workdir) == parts)
            run(config_file, workdir)
        if moment == "before checkpoints are deleted":
            shutil.copytree(workdir, tmp_path / "half")
            assert (workdir / "checkpoints/32").exists()
    assert not (workdir / "checkpoints/32").exists()
    assert run(config_file, workdir) == 0
    assert_same(workdir, done)
    # A kill in the middle of the deletion.
    shutil.rmtree(tmp_path / "half/checkpoints/32/meta")
    assert run(config_file, tmp_path / "half") == 0
    assert_same(tmp_path / "half", done)


@pytest.mark.slow
def test_a_preemption_changes_neither_what_is_found_nor_where_the_run_goes(
    config_file, done, tmp_path, monkeypatch
):
    """Before the spike, and at its end, which the run then has not yet seen."""
    for stop in (28, 36):
        asked = []

        def due(request, stop=stop, asked=asked):
            asked.append(request)
            lines = tmp_path / "run/metrics.jsonl"
            return lines.exists() and metric_lines(tmp_path / "run")[-1]["step"] == stop - 1

        with monkeypatch.context() as patch:
            patch.setattr(preemption.SaveRequest, "due", due)
            assert run(config_file, tmp_path / "run") == 75
        assert asked and (tmp_path / f"run/checkpoints/{stop}").exists()
    assert run(config_file, tmp_path / "run") == 0
    assert_same(tmp_path / "run", done)
