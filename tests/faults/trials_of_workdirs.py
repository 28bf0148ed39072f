"""Trials with the files and the data of a run: damaged lines, a lost config, two runs in one workdir,
checkpoints that may not be read, files that can't be written, data that change or go away.
"""

import contextlib
import csv
import errno
import json
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys

import ml_collections
import numpy as np
from conftest import ROOT, TINY
from etils import epath
from processes_at_hand import expect
from trials_of_files import encoded, finished_run, layout_of, photo, write_tar

from vit_jax import cli, predict
from vit_jax import config as configs
from vit_jax.checkpoints import read as checkpoint
from vit_jax.checkpoints.manager import Checkpointer
from vit_jax.errors import Unavailable, UserError
from vit_jax.models.preparation import Preparation
from vit_jax.train import metrics, workdir

NOBODY = 65534


def error_of(function, *arguments) -> UserError | None:
    """The UserError that a call raises, or None."""
    try:
        function(*arguments)
    except UserError as error:
        expect(len(str(error).splitlines()) == 1, error)
        return error
    return None


# --- metrics.jsonl ---

BROKEN_LINES = {
    "blank": lambda rng, line: b"",
    "NUL": lambda rng, line: b"\0" * rng.randrange(1, 5000),
    "half": lambda rng, line: line[: rng.randrange(1, len(line) - 1)],
    "noise": lambda rng, line: rng.randbytes(30).replace(b"\n", b"") + b"\xff",
    "no object": lambda rng, line: b"[1, 2]",
    "no step": lambda rng, line: line.replace(b"step", b"stop"),
    "text": lambda rng, line: line.replace(b"2.5", b'"many"'),
    "deep": lambda rng, line: b"[" * 100_000,
}


def damaged_lines(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Lines of metrics.jsonl that are not whole: the others are kept, and so is the old file."""
    kept = 0
    for number in range(count):
        path = epath.Path(folder) / f"{number}/metrics.jsonl"
        path.parent.mkdir()
        steps = range(1, rng.randrange(2, 60))
        lines = [json.dumps({"step": step, "train/loss": 2.5}).encode() for step in steps]
        bad = set(rng.sample(range(len(lines)), rng.randrange(min(4, len(lines)))))
        for i in bad:
            lines[i] = BROKEN_LINES[rng.choice(list(BROKEN_LINES))](rng, lines[i])
        content = b"\n".join(lines) + b"\n" * rng.randrange(2)
        path.write_bytes(content)
        last = rng.randrange(len(lines) + 1)
        metrics.rewind(path, last)
        found = [line["step"] for line in metrics.read_lines(path)]
        expected = [i + 1 for i in range(len(lines)) if i not in bad and i < last]
        expect(found == expected, f"steps {found} are left of {expected}")
        copies = [each.read_bytes() for each in path.parent.glob("damaged_*")]
        expect(copies in ([content], []), "the old file is not kept")
        expect(copies or not bad - {len(lines) - 1}, "the old file is not kept")
        kept += len(copies)
    return dict(tried=count, kept_files=kept)


# --- a finished run: its config, and who may read its checkpoints ---


OTHER = {
    "optim.lr": 0.5,
    "seed": 7,
    "loss": "sigmoid_xent",
    "data.batch_size": 32,
    "model.depth": 3,
    "optim.warmup_steps": 1,
    "data.area_min": 0.25,
    "label_smoothing": 0.1,
}


def lost_configs(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """config.json is missing or damaged: another config does not continue the checkpoints."""
    run = epath.Path(finished_run(folder))
    text = (run / "config.json").read_text()
    fingerprint = json.loads(text)["data_fingerprint"]
    refused = 0
    for _ in range(count):
        damage = rng.choice(("missing", "empty", "half", "whole"))
        cut = dict(empty=0, half=rng.randrange(1, len(text) - 2)).get(damage, len(text))
        (run / "config.json").write_text(text[:cut])
        if damage == "missing":
            (run / "config.json").unlink()
        name = rng.choice([*OTHER, ""])
        overrides = ["--config.total_steps=8", "--config.evals.val.every=0"]
        overrides += [f"--config.{name}={OTHER[name]}"] if name else []
        config = configs.load(f"{folder}/tiny.py", overrides)
        error = error_of(workdir.check, run, config, fingerprint)
        if damage in ("missing", "whole"):
            expect((name in str(error)) if name else error is None, f"{damage}, {name}: {error}")
        else:
            expect(error, f"{damage}: nothing is said")
        refused += error is not None
    return dict(tried=count, refused=refused)


@contextlib.contextmanager
def as_nobody():
    """As a user who may not read everything; root may."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def denied_checkpoints(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """A folder or file of the newest checkpoint may not be read: the run ends, and nothing is
    renamed.
    """
    run = finished_run(folder)
    for parent in (folder, folder.parent):
        parent.chmod(0o755)
    newest = run / "checkpoints/8"
    paths = [newest, *newest.rglob("*")]
    config = ml_collections.ConfigDict(
        dict(keep_last=2, keep_every=0, keep_best="", max_failures=3)
    )
    layout = layout_of(f"{folder}/tiny.py")
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    for _ in range(count):
        denied = rng.choice(paths)
        mode = denied.stat().st_mode
        denied.chmod(rng.choice((0o000, 0o600)) if denied.stat().st_uid else 0o700)
        try:
            with as_nobody(), Checkpointer(run / "checkpoints", config) as checkpointer:
                error = error_of(checkpointer.restore, lambda meta: layout)
        finally:
            denied.chmod(mode)
        expect(isinstance(error, checkpoint.Unreachable), f"{denied}: {error}")
        expect(sorted(path.name for path in (run / "checkpoints").iterdir()) == names, denied)
    return dict(tried=count)


# --- two runs in one workdir ---

# Takes and leaves what a line of its input says, and says what came of it.
TAKER = """
import sys
from etils import epath
from vit_jax.cli import lock
from vit_jax.errors import UserError
held = {}
for line in sys.stdin:
    what, folder = line.split()
    if what == "leave":
        held.pop(folder).release()
        print("left", flush=True)
    if what == "take":
        try:
            one = lock.Lock(epath.Path(folder))
            one.acquire(take_over=False)
            held[folder] = one
            print("held", flush=True)
        except UserError as error:
            print(error, flush=True)
"""


def taker() -> subprocess.Popen:
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    return subprocess.Popen([sys.executable, "-c", TAKER], cwd=ROOT, **pipes)


def two_runs(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Three processes take a workdir at once: one has it, the others name it; after it left or was
    killed, another one gets it at once.
    """
    takers = [taker() for _ in range(3)]
    killed = 0
    for number in range(count):
        place = folder / str(number)
        place.mkdir()
        winner = takers[take(takers, place)]
        if rng.random() < 0.1:
            killed += 1
            winner.kill()
            winner.communicate()
            takers[takers.index(winner)] = taker()
        else:
            leave(winner, place)
        rest = [each for each in takers if each is not winner]
        leave(rest[take(rest, place)], place)
    for each in takers:
        each.communicate(timeout=30)
    return dict(tried=count, killed_holders=killed)


def take(takers: list[subprocess.Popen], place: pathlib.Path) -> int:
    """The number of the process that gets it."""
    for each in takers:
        each.stdin.write(f"take {place}\n")
    answers = [each.stdout.readline().strip() for each in takers]
    expect(answers.count("held") == 1, answers)
    winner = answers.index("held")
    pid = f"in use by process {takers[winner].pid} on "
    expect(all(text == "held" or pid in text for text in answers), answers)
    return winner


def leave(holder: subprocess.Popen, place: pathlib.Path) -> None:
    holder.stdin.write(f"leave {place}\n")
    expect(holder.stdout.readline() == "left\n", "it is not left")


# --- files that a command writes ---


@contextlib.contextmanager
def full_disk(limit: int):
    """No file may be longer than `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def written_files(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """A disk that is full while predictions or a table are written over those of yesterday: there
    are the new ones or the old ones, whole, whatever the images are called.
    """
    replaced = 0
    for number in range(count):
        names = [os.fsdecode(rng.randbytes(6).replace(b"\0", b"n")) for _ in range(20)]
        features = np.asarray([[rng.random() for _ in range(4)] for _ in names], np.float32)
        result = dict(path=names, features=features, names=[], unreadable=[])
        kind = rng.choice(("csv", "npz", "json"))
        path = folder / f"{number}.{kind}"
        path.write_text("yesterday's")
        limit = rng.randrange(2000)

        def write(path=path, kind=kind, result=result):
            if kind == "json":
                cli.write_json(str(path), result | dict(features=result["features"].tolist()))
            else:
                predict.write(str(path), result)

        with full_disk(limit):
            error = error_of(write)
        if error:
            expect(path.read_text() == "yesterday's", f"{kind}, {limit} bytes: {path} is damaged")
        else:
            expect(read_back(path) == features.tolist(), f"{kind}: {path} is not whole")
        expect(sorted(each.name for each in folder.iterdir()) == [path.name], "a file is left")
        path.unlink()
        replaced += error is None
    return dict(tried=count, replaced=replaced)


def read_back(path: pathlib.Path) -> list:
    if path.suffix == ".json":
        return json.loads(path.read_text())["features"]
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return arrays["features"].tolist()
    with path.open(newline="", errors="surrogateescape") as file:
        rows = list(csv.reader(file))[1:]
    return np.asarray([row[1:] for row in rows], np.float32).tolist()


# --- data that change or go away ---


def replace(rng, path: pathlib.Path) -> None:
    fresh = path.with_suffix(".new")
    write_tar(rng, fresh)
    fresh.replace(path)


def truncate(rng, path: pathlib.Path) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def append(rng, path: pathlib.Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(512))


CHANGES = {
    "replaced": replace,
    "truncated": truncate,
    "longer": append,
    "deleted": lambda rng, path: path.unlink(),
    "none": lambda rng, path: None,
    "read": lambda rng, path: path.read_bytes(),
}


def changed_shards(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """A tar shard changes while a run reads it: no step since then is saved."""
    from vit_jax.data.sources import open as sources
    from vit_jax.train import run_data

    found = 0
    for number in range(count):
        root = folder / str(number)
        root.mkdir()
        shards = [root / f"{i}.tar" for i in range(3)]
        for shard in shards:
            write_tar(rng, shard)
        source = sources.open_source(f"tars:{root}", "train")
        kind = rng.choice(list(CHANGES))
        shard = rng.choice(shards)
        CHANGES[kind](rng, shard)
        error = error_of(run_data.check_unchanged, source)
        expect(bool(error) == (kind not in ("none", "read")), f"{kind}: {error}")
        expect(not error or str(shard) in str(error), f"{kind}: {error}")
        found += error is not None
    return dict(tried=count, found=found)


GONE = {
    "moved": None,
    "EIO": errno.EIO,
    "EACCES": errno.EACCES,
    "ESTALE": errno.ESTALE,
    "all damaged": None,
}


def lost_data(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """The images go away, or can't be read, or all of them are damaged, while on_corrupt is "skip":
    the run ends within a thousand examples, and says what is wrong.
    """
    from vit_jax.data import order, pipeline
    from vit_jax.data.sources import open as sources
    from vit_jax.data.sources import storage

    root = folder / "data"
    for number in range(40):
        path = root / "train" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(rng), "PNG"))
    source = sources.open_source(f"folder:{root}", "train")
    read_local = storage.read_local
    for _ in range(count):
        kind = rng.choice(list(GONE))
        rows = np.arange(rng.choice((8, 40)))
        host = pipeline.Pipeline(
            source=source,
            items=order.train_items(source.parts, len(rows), rows, seed=rng.randrange(99)),
            pixels=pipeline.images.alone(pipeline.images.eval_image(Preparation((8, 8), (8, 8)))),
            shapes=pipeline.shapes.of_one((8, 8)),
            rows=len(rows),
            steps=10_000,
            on_corrupt="skip",
            threads=2,
        )
        batches = host.batches()
        for _ in range(rng.randrange(4)):
            expect(next(batches)["mask"].all(), "valid images are skipped")
        with lost(kind, root, storage, read_local):
            seen = 0
            error = None
            while error is None:
                expect(seen < 3000, f"{kind}: goes on after {seen} examples without one image")
                error = error_of(lambda batches=batches: next(batches))
                seen += len(rows)
        lasting = kind in ("EIO", "ESTALE")
        expect(isinstance(error, Unavailable) == lasting, f"{kind}: {error!r}")
    return dict(tried=count)


@contextlib.contextmanager
def lost(kind: str, root: pathlib.Path, storage, read_local):
    def fail(path):
        raise OSError(GONE[kind], os.strerror(GONE[kind]), path)

    try:
        if kind == "moved":
            root.rename(root.with_name("away"))
        elif kind == "all damaged":
            storage.read_local = lambda path: b"<html>404 Not Found</html>"
        else:
            storage.read_local = fail
        yield
    finally:
        storage.read_local = read_local
        if kind == "moved":
            root.with_name("away").rename(root)


def whole_lost_data(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """The train command loses its data, is started again with them, and ends as if nothing had
    happened.
    """
    from test_train import final_params, same_bits
    from trials_of_runs import wait_for_step, whole_command

    for number in range(80):
        path = folder / "data/train" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(rng), "JPEG"))
    shutil.copytree(folder / "data/train", folder / "data/val")
    text = TINY.replace('name="digits"', f'name="folder:{folder}/data", on_corrupt="skip"')
    (folder / "tiny.py").write_text(text)
    straight = whole_command(folder, "straight")
    expect(straight.wait(timeout=180) == 0, "the uninterrupted run fails")
    log = folder / "run/log.txt"
    for number in range(count):
        job = whole_command(folder, "run")
        steps = checkpoint.steps(folder / "run/checkpoints")
        first = steps[-1] if steps else 0
        wait_for_step(job, folder / "run", first + rng.randrange(3, 15), starts=number + 1)
        (folder / "data").rename(folder / "away")
        _, err = job.communicate(timeout=180)
        (folder / "away").rename(folder / "data")
        last = err.strip().splitlines()[-1]
        expect(job.returncode == 2 and "can't be read (" in last, (job.returncode, last))
    job = whole_command(folder, "run")
    _, err = job.communicate(timeout=180)
    expect(job.returncode == 0, err[-600:])
    expect(log.read_text().count("training from step") == count + 1, "it did not continue")
    expect(same_bits(final_params(folder / "straight"), final_params(folder / "run")), "parameters")
    return dict(tried=count)
