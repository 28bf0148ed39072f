"""Trials with damaged checkpoints and images: none of them is used, and everything else is."""

import io
import json
import pathlib
import random
import shutil
import tarfile
import warnings

import jax
import ml_collections
import numpy as np
from conftest import TINY, build_experiment
from PIL import Image, ImageOps
from processes_at_hand import expect

from vit_jax import config as configs
from vit_jax.checkpoints import read as checkpoint
from vit_jax.checkpoints.manager import Checkpointer
from vit_jax.errors import UserError
from vit_jax.train import __main__ as train
from vit_jax.train import state as states
from vit_jax.weights.scan_layout import flatten


def flip(rng, path: pathlib.Path, width: int) -> None:
    raw = bytearray(path.read_bytes())
    if raw:
        raw[rng.randrange(len(raw))] ^= width
        path.write_bytes(raw)


def absurd(rng, path: pathlib.Path) -> None:
    """Numbers in a text, such as a declared shape, become huge; a binary file becomes noise."""
    try:
        text = path.read_text()
        json.loads(text)
    except ValueError:
        return path.write_bytes(rng.randbytes(path.stat().st_size))
    path.write_text(text.replace("[32", "[3200000000").replace("64]", "64000000000]"))


DAMAGES = {
    "a bit": lambda rng, path: flip(rng, path, 1 << rng.randrange(8)),
    "a byte": lambda rng, path: flip(rng, path, 255),
    "truncated": lambda rng, path: path.write_bytes(
        path.read_bytes()[: rng.randrange(path.stat().st_size or 1)]
    ),
    "empty": lambda rng, path: path.write_bytes(b""),
    "missing": lambda rng, path: path.unlink(),
    "absurd": absurd,
    "half deleted": lambda rng, path: shutil.rmtree(path.parent),
}


def finished_run(folder: pathlib.Path) -> pathlib.Path:
    """A run of 8 steps with checkpoints 4 and 8, by tiny.py."""
    (folder / "tiny.py").write_text(TINY)
    small = [f"--config={folder}/tiny.py", f"--workdir={folder}/run", "--config.evals.val.every=0"]
    expect(train.main([*small, "--config.total_steps=8"]) == 0, "the run fails")
    return folder / "run"


def damaged_checkpoints(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Damages files of the newer of two checkpoints: either the restored bits are right, or the
    older one is restored.
    """
    good = finished_run(folder) / "checkpoints"
    config = ml_collections.ConfigDict(
        dict(keep_last=2, keep_every=0, keep_best="", max_failures=3)
    )
    saved = {step: read(good, step) for step in (4, 8)}
    # The few large files with the arrays would rarely be hit, so most damage goes there.
    files = [path.relative_to(good) for path in sorted((good / "8").rglob("*")) if path.is_file()]
    large = [path for path in files if (good / path).stat().st_size > 1000]
    layout = layout_of(f"{folder}/tiny.py")
    harmless = 0
    rejected = 0
    for number in range(count):
        bad = folder / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        name = list(DAMAGES)[number % len(DAMAGES)]
        DAMAGES[name](rng, bad / rng.choice(large if rng.random() < 0.6 else files))
        is_there = (bad / "8").is_dir()
        try:
            params = flatten(checkpoint.read_params(bad / "8"))
            wrong = [
                key for key in params if not np.array_equal(params[key], saved[8][f"params/{key}"])
            ]
            expect(not wrong, f"{name}: {wrong} were read, but are wrong")
        except UserError as error:
            expect(
                len(str(error).splitlines()) == 1 and "can't be used" in str(error),
                f"{name}: {error}",
            )
        with Checkpointer(bad, config) as checkpointer:
            step, state = checkpointer.restore(lambda meta: layout)
        restored = flatten(jax.device_get(state))
        wrong = [key for key in saved[step] if not np.array_equal(restored[key], saved[step][key])]
        expect(not wrong, f"{name}: {wrong} were restored, but are wrong")
        expect((step == 4 and is_there) == (bad / "damaged_8").is_dir(), f"{name}: restored {step}")
        harmless += step == 8
        rejected += step == 4
    return dict(tried=count, rejected=rejected, harmless=harmless)


def read(folder: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """A valid state by names of leaves, read without our code."""
    import orbax.checkpoint as ocp

    # Orbax warns that the topology may have changed; it is the same.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        tree = ocp.PyTreeCheckpointer().restore(folder / str(step) / "state")
    return {key: np.asarray(value) for key, value in flatten(tree).items()}


def layout_of(tiny: str) -> dict:
    """Shapes of the state of a run with this config, on the devices of this process."""
    return states.as_dict(build_experiment(configs.load(tiny)).abstract_state)


def photo(rng, mode: str = "RGB", size=(40, 30)) -> Image.Image:
    """A smooth picture with some grain."""
    noise = np.random.default_rng(rng.randrange(2**32))
    small = Image.fromarray(noise.integers(0, 255, (6, 8, 3), np.uint8))
    smooth = small.resize(size, Image.Resampling.BICUBIC)
    grain = noise.integers(-9, 9, (size[1], size[0], 3))
    pixels = np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, form: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def write_tar(rng, path: pathlib.Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number in range(4):
            content = encoded(photo(rng), "JPEG")
            member = tarfile.TarInfo(f"{rng.choice(('cat', 'dog'))}/{number}.jpg")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def cut(rng, raw: bytes) -> bytes:
    return raw[: rng.randrange(2, len(raw) - 20)]


def overwritten(rng, raw: bytes) -> bytes:
    start = rng.randrange(len(raw) - 40)
    return raw[:start] + rng.randbytes(40) + raw[start + 40 :]


def bomb(rng) -> bytes:
    """A PNG whose header declares 10 billion pixels."""
    raw = bytearray(encoded(photo(rng), "PNG"))
    raw[16:24] = (100_000).to_bytes(4, "big") * 2
    return bytes(raw)


def deep(rng) -> bytes:
    noise = np.random.default_rng(rng.randrange(99))
    gray = noise.integers(0, 65535, (30, 40)).astype(np.uint16)
    return encoded(Image.fromarray(gray), "PNG")


def rotated(rng) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(photo(rng), "JPEG", exif=exif)


def animated(rng) -> bytes:
    frames = [photo(rng, "P") for _ in range(3)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50)


# Kind -> (suffix, f(rng) -> bytes, whether it can be used; None: it depends on the damage).
KINDS = {
    "cut JPEG": ("jpg", lambda rng: cut(rng, encoded(photo(rng), "JPEG")), False),
    "cut PNG": ("png", lambda rng: cut(rng, encoded(photo(rng), "PNG")), False),
    "overwritten JPEG": (
        "jpg",
        lambda rng: overwritten(rng, encoded(photo(rng), "JPEG")),
        None,
    ),
    "overwritten PNG": (
        "png",
        lambda rng: overwritten(rng, encoded(photo(rng), "PNG")),
        None,
    ),
    "empty": ("jpg", lambda rng: b"", False),
    "noise": ("jpg", lambda rng: rng.randbytes(900), False),
    "text": ("png", lambda rng: b"<html>404 Not Found</html>" * rng.randrange(1, 9), False),
    "decompression bomb": ("png", bomb, False),
    "PNG named JPEG": ("jpg", lambda rng: encoded(photo(rng), "PNG"), True),
    "CMYK": ("jpg", lambda rng: encoded(photo(rng, "CMYK"), "JPEG"), True),
    "16-bit": ("png", deep, True),
    "animated, palette": ("gif", animated, True),
    "palette": ("png", lambda rng: encoded(photo(rng, "P"), "PNG"), True),
    "rotated by EXIF": ("jpg", rotated, True),
    "grey with alpha": ("png", lambda rng: encoded(photo(rng, "LA"), "PNG"), True),
}


def pixels_of(root: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[int, str]]:
    """One pass over a folder: (pixels by path, reasons by path of the skipped images)."""
    from vit_jax.data import pipeline
    from vit_jax.data.sources import open as sources

    source = sources.open_source(f"folder:{root}", "train", "")
    data = ml_collections.ConfigDict(dict(crop="resize", method=""))
    rows = np.arange(50)
    host = pipeline.eval_pipeline(data, source, rows, 50, 16, "skip")
    found = {}
    for batch in host.batches():
        for index, image, mask in zip(
            batch["id"].tolist(), batch["image"], batch["mask"], strict=True
        ):
            if mask:
                found[source.describe(index)] = image
    return found, {source.describe(index): why for index, why in host.skipped.items()}


def damaged_images(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Damaged and unusual images among valid ones: those that can't be used are skipped and named,
    and no other one changes.
    """
    root = folder / "data/train"
    kinds = {}
    num_valid = max(20, count // 5)
    for number in range(num_valid):
        path = root / ("cat", "dog")[number % 2] / f"valid_{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(rng), "JPEG"))
    before, bad = pixels_of(root.parent)
    expect(len(before) == num_valid and not bad, f"valid images were skipped: {bad}")
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        suffix, make, _ = KINDS[kind]
        label = rng.choice(("cat", "dog"))
        path = root / label / f"{rng.randrange(10**6):06}_{number}.{suffix}"
        path.write_bytes(make(rng))
        kinds[str(path)] = kind
    after, bad = pixels_of(root.parent)
    expect(len(after) + len(bad) == num_valid + count, "images are missing")
    expect(
        all(np.array_equal(after[path], image) for path, image in before.items()),
        "valid images changed",
    )
    for path, kind in kinds.items():
        usable = KINDS[kind][2]
        expect(
            usable is None or usable == (path in after),
            f"{kind}: {path} is {bad.get(path, 'used')}",
        )
        if path in after and usable:
            with Image.open(path) as image:
                turned = ImageOps.exif_transpose(image)
                expected = turned.convert("RGB").resize((16, 16), Image.Resampling.BILINEAR)
            expected = np.asarray(expected, np.float32)
            off = np.abs(np.asarray(after[path], np.float32) - expected).mean()
            expect(
                kind == "16-bit" or off < 40,
                f"{kind}: {path} is off by {off:.0f} levels on average",
            )
        expect(path in after or len(bad[path].splitlines()) <= 1, bad.get(path))
    return dict(tried=count, used=len(after) - num_valid, skipped=len(bad))
