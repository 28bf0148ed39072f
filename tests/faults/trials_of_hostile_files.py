"""Trials with FIFOs, sockets and devices under the names of files, with sizes that fill the memory,
and with files that can't be read: each ends in one line, at once.
"""

import collections
import contextlib
import errno
import io
import json
import os
import pathlib
import random
import shutil
import stat
import tarfile
from unittest import mock

import jax
import ml_collections
import numpy as np
from conftest import GOLDEN, TINY, golden_folder
from processes_at_hand import error_lines, expect
from trials_of_files import encoded, photo, write_tar

import vit_jax
from vit_jax import predict
from vit_jax.checkpoints import checksums
from vit_jax.checkpoints import read as checkpoint
from vit_jax.data import images, pipeline
from vit_jax.data.sources import open as sources
from vit_jax.distributed import runtime, waits
from vit_jax.errors import Unavailable, UserError
from vit_jax.models import create
from vit_jax.train import __main__ as train

HANG_S = 60


def in_time(what: str, function):
    """function(), which must not hang: (result, None) or (None, the UserError)."""
    try:
        return waits.in_thread(function).result(HANG_S), None
    except UserError as error:
        expect(len(str(error).splitlines()) == 1 and len(str(error)) < 900, f"{what}: {error}")
        return None, error
    except TimeoutError:
        expect(False, f"{what}: hung for {HANG_S} s")


def put_odd(rng, path: pathlib.Path) -> str:
    """Replaces a file by what is none, or a link to such; returns its kind."""
    kind = rng.choice(("FIFO", "socket", "device", "link to a FIFO", "link to a device"))
    path.unlink(missing_ok=True)
    target = path
    if kind.startswith("link"):
        outside = next(parent for parent in path.parents if parent.name == "trial").parent
        target = outside / str(rng.randrange(10**12))
        if "device" in kind:
            target = pathlib.Path(rng.choice(("/dev/zero", "/dev/random", "/dev/null")))
        path.symlink_to(target)
    if "FIFO" in kind:
        os.mkfifo(target)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "device":
        path.symlink_to(rng.choice(("/dev/zero", "/dev/full")))
    return kind


def says_what_it_is(error, path: pathlib.Path) -> bool:
    return error is not None and "not a regular file" in str(error) and path.name in str(error)


# --- data ---


def one_pass(name: str) -> tuple[int, dict[str, str]]:
    """One pass over the training split of a data set: (images used, reasons by name of others)."""
    source = sources.open_source(name, "train", "")
    data = ml_collections.ConfigDict(dict(crop="resize", method=""))
    host = pipeline.eval_pipeline(data, source, np.arange(8), 8, 8, "skip", 2)
    used = sum(int(batch["mask"].sum()) for batch in host.batches())
    return used, {source.describe(index): why for index, why in host.skipped.items()}


def image_folder(rng, folder: pathlib.Path) -> list[pathlib.Path]:
    """8 images of two classes."""
    paths = [folder / "train" / "ab"[i % 2] / f"{i}.jpg" for i in range(8)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(rng), "JPEG"))
    return paths


def odd_image(rng, folder: pathlib.Path) -> str:
    path = rng.choice(image_folder(rng, folder))
    kind = put_odd(rng, path)
    (used, skipped), _ = in_time(kind, lambda: one_pass(f"folder:{folder}"))
    expect(used == 7 and list(skipped) == [str(path)], f"{kind}: {used} used, skipped {skipped}")
    expect("not a regular file" in skipped[str(path)], f"{kind}: {skipped}")
    return "odd files"


def odd_manifest(rng, folder: pathlib.Path) -> str:
    """The CSV file, or an image that it names."""
    paths = image_folder(rng, folder)
    lines = [f"{path.relative_to(folder)},{path.parent.name}" for path in paths]
    manifest = folder / "images.csv"
    manifest.write_text("\n".join(["path,label", *lines]))
    path = rng.choice((manifest, *paths))
    kind = put_odd(rng, path)
    found, error = in_time(kind, lambda: one_pass(f"csv:{manifest}"))
    if path == manifest:
        expect(says_what_it_is(error, path), f"{kind}: {found} {error}")
    else:
        expect(found and found[0] == 7 and list(found[1]) == [str(path)], f"{kind}: {found}")
    return "odd files"


def odd_tar(rng, folder: pathlib.Path) -> str:
    paths = [folder / f"train-{number}.tar" for number in range(2)]
    for path in paths:
        write_tar(rng, path)
    path = rng.choice(paths)
    kind = put_odd(rng, path)
    _, error = in_time(kind, lambda: one_pass(f"tars:{folder}"))
    expect(says_what_it_is(error, path), f"{kind}: {error}")
    return "odd files"


def absurd_member(rng, folder: pathlib.Path) -> str:
    """A member of a tar that declares far more bytes than the tar has."""
    path = folder / "train-0.tar"
    write_tar(rng, path)
    size = rng.choice((10**18, 10**12, 2**62, 10**24, path.stat().st_size))
    name = rng.choice(("huge.jpg", "huge.cls", "huge.json", "huge.txt"))
    member = tarfile.TarInfo(f"a/{name}")
    member.size = size
    with path.open("r+b") as file:
        file.seek(-tarfile.RECORDSIZE, os.SEEK_END)
        file.write(member.tobuf(tarfile.GNU_FORMAT) + b"x" * 512 + bytes(1024))
    _, error = in_time(name, lambda: one_pass(f"tars:{folder}"))
    expect(error and name in str(error) and path.name in str(error), f"{size} bytes: {error}")
    return "absurd sizes"


def bomb(rng, folder: pathlib.Path) -> str:
    """Images that decode to more than their thread's share of a small machine's memory."""
    paths = image_folder(rng, folder)
    forms = ("PNG", "GIF", "BMP", "WEBP", "JPEG")
    form = rng.choice(forms)
    path = rng.choice(paths)
    side = rng.randrange(600, 900)
    path.write_bytes(encoded(photo(rng, "RGB", (side, side)), form))
    few = 2 * 40 * images.PIXEL_BYTES * rng.randrange(3_000, 200_000) // 10
    images.memory.cache_clear()
    with (
        mock.patch.object(images, "CAMERA_PIXELS", 0),
        mock.patch.object(runtime, "free_memory", lambda: 2 * few),
    ):
        most = images.most_pixels(2)
        (used, skipped), _ = in_time(form, lambda: one_pass(f"folder:{folder}"))
    images.memory.cache_clear()
    if side * side <= most:
        expect(used == 8, f"{form}, {side}, {most}: {skipped}")
        return "small enough images"
    expect(used == 7 and list(skipped) == [str(path)], f"{form}, {side}, {most}: {skipped}")
    why = skipped[str(path)]
    expect(f"{most:,}" in why and str(side * side) in why, f"{form}: {why}")
    return "bombs"


DATA = (odd_image, odd_manifest, odd_tar, absurd_member, bomb)


def hostile_data(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Data sets with one file that is none, or is too large."""
    return trials(DATA, rng, folder, count)


# --- weights ---


FOLDERS = ("timm_token", "hf_vit")


def some_weights(rng, folder: pathlib.Path) -> list[pathlib.Path]:
    """[path to give, its files]"""
    name = rng.choice((*FOLDERS, "vit_token_rep"))
    if name not in FOLDERS:
        path = folder / "weights.npz"
        np.savez(path, **{"embedding/kernel": np.zeros((8, 8, 3, 48), np.float32)})
        return [path, path]
    golden_folder(folder, name)
    files = sorted(path for path in (folder / name).iterdir() if path.suffix != ".npz")
    return [folder / name, *files]


def odd_weights(rng, folder: pathlib.Path) -> str:
    where, *files = some_weights(rng, folder)
    path = rng.choice(files)
    kind = put_odd(rng, path)
    _, error = in_time(kind, lambda: vit_jax.from_pretrained(where))
    expect(says_what_it_is(error, path), f"{kind} {path.name}: {error}")
    return "odd files"


def unreadable_weights(rng, folder: pathlib.Path) -> str:
    """Weights that the disk does not give, or only to others, read by a command."""
    where, *files = some_weights(rng, folder)
    path = rng.choice(files)
    code = rng.choice((errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM))
    opened = os.open

    def fails(name, flags, *more, **others):
        if os.fspath(name) == str(path):
            raise OSError(code, os.strerror(code), str(path))
        return opened(name, flags, *more, **others)

    err = io.StringIO()
    with mock.patch("os.open", fails), contextlib.redirect_stderr(err):
        exit_code = predict.main([f"--checkpoint={where}", str(GOLDEN)])
    lines = error_lines(err.getvalue())
    expected = Unavailable.exit_code if code in (errno.EIO, errno.ESTALE) else UserError.exit_code
    expect(exit_code == expected and len(lines) == 1, f"{code}: {exit_code} {err.getvalue()}")
    for promise in ("checkpoints are intact", "elsewhere", "fetch the file again"):
        expect(promise not in lines[0], f"{code}: {lines[0]}")
    expect(path.name in lines[0], lines[0])
    return "unreadable files"


WEIGHTS = (odd_weights, unreadable_weights)


def hostile_weights(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Weights of which one file is none, or can't be read."""
    return trials(WEIGHTS, rng, folder, count)


# --- checkpoints and workdirs ---


SIZES = ("depth", "width", "mlp_dim", "num_heads", "num_classes", "image_size", "patch_size")


def odd_checkpoint(rng, good: pathlib.Path, folder: pathlib.Path) -> str:
    shutil.copytree(good, folder / "run")
    step = folder / "run/checkpoints/8"
    path = rng.choice([path for path in sorted(step.rglob("*")) if path.is_file()])
    kind = put_odd(rng, path)
    _, error = in_time(kind, lambda: vit_jax.from_pretrained(folder / "run"))
    expect(says_what_it_is(error, path), f"{kind} {path.name}: {error}")
    return "odd files"


def absurd_checkpoint(rng, good: pathlib.Path, folder: pathlib.Path) -> str:
    """A meta that declares a size that no model has, or not this one."""
    shutil.copytree(good, folder / "run")
    path = folder / "run/checkpoints/8/meta/metadata"
    sealed = json.loads(path.read_text())
    name = rng.choice(("depth", rng.choice(SIZES)))
    size = rng.choice((10**9, 10**12, 2**31, 2**63, 2**20 + 1, 4000 if name == "depth" else 10**10))
    sealed["meta"]["model"][name] = [size, size] if "_size" in name else size
    content = {key: sealed[key] for key in ("meta", "checksums")}
    sealed["sha256"] = checksums.fingerprint(content)  # as one would who makes it on purpose
    path.write_text(json.dumps(sealed))
    _, error = in_time(name, lambda: vit_jax.from_pretrained(folder / "run"))
    expect(error, f"{name}={size} was accepted")
    return "absurd sizes"


NAMES = ("log.txt", "metrics.jsonl", "skipped.jsonl", "goodput.json", "config.json", "lock.json",
         "left_out.json", "curves.png", "goodput.json.tmp", ".write_test_0", "logs/process_1.txt",
         "checkpoints/8/_CHECKPOINT_METADATA", "any.name")  # fmt: skip


def odd_workdir(rng, good: pathlib.Path, folder: pathlib.Path) -> str:
    shutil.copytree(good, folder / "run")
    path = folder / "run" / rng.choice(NAMES)
    path.parent.mkdir(exist_ok=True)
    kind = put_odd(rng, path)
    arguments = [f"--config={good.parent}/tiny.py", f"--workdir={folder}/run"]
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        code, _ = in_time(f"{kind} {path.name}", lambda: train.main(arguments))
    lines = error_lines(err.getvalue())
    expect(code == 2 and len(lines) == 1, f"{kind} {path.name}: exit {code}, {err.getvalue()}")
    expect(path.name in lines[0] and "not a regular file" in lines[0], lines[0])
    expect("training from step" not in err.getvalue(), f"{kind} {path.name}: the run began")
    return "odd files"


RUNS = (odd_checkpoint, absurd_checkpoint, odd_workdir)


def hostile_runs(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Workdirs of which one file is none, or says what can't be."""
    (folder / "tiny.py").write_text(TINY)
    model = create.create("Ti/4", 10, 8, width=32, depth=2, mlp_dim=64, num_heads=4)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), create.abstract_params(model))
    meta = dict(model=create.fields(model), class_names=[], config=dict(loss="softmax_xent"))
    checkpoint.write_params(folder / "good/checkpoints/8", params, meta)
    vit_jax.from_pretrained(folder / "good")
    return trials(RUNS, rng, folder, count, folder / "good")


def trials(kinds: tuple, rng: random.Random, folder: pathlib.Path, count: int, *more) -> dict:
    """Each kind in turn, in an empty folder: {"tried": count} and how many had which outcome."""
    outcomes = collections.Counter()
    for number in range(count):
        place = folder / "trial"
        place.mkdir()
        outcomes[kinds[number % len(kinds)](rng, *more, place).replace(" ", "_")] += 1
        shutil.rmtree(place)
    return dict(tried=count) | outcomes
