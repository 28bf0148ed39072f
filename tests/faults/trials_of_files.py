"""Damaged checkpoints and images: nothing of them is used, everything else is."""

import io
import json
import pathlib
import random
import shutil
import warnings

import jax
import ml_collections
import numpy as np
from conftest import TINY
from PIL import Image
from processes_at_hand import expect

from vit_jax import config as configs
from vit_jax.checkpoints import read as checkpoint
from vit_jax.checkpoints.manager import Checkpointer
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.train import __main__ as train
from vit_jax.train import experiment
from vit_jax.train import state as states
from vit_jax.weights.scan_layout import flatten


def flip(chance, path: pathlib.Path, width: int) -> None:
    raw = bytearray(path.read_bytes())
    if raw:
        raw[chance.randrange(len(raw))] ^= width
        path.write_bytes(raw)


def absurd(chance, path: pathlib.Path) -> None:
    """Numbers in a text become huge, as a declared shape; a binary file is overwritten with noise."""
    try:
        text = path.read_text()
        json.loads(text)
    except ValueError:
        return path.write_bytes(chance.randbytes(path.stat().st_size))
    path.write_text(text.replace("[32", "[3200000000").replace("64]", "64000000000]"))


DAMAGES = {
    "a bit": lambda chance, path: flip(chance, path, 1 << chance.randrange(8)),
    "a byte": lambda chance, path: flip(chance, path, 255),
    "truncated": lambda chance, path: path.write_bytes(
        path.read_bytes()[: chance.randrange(path.stat().st_size or 1)]
    ),
    "empty": lambda chance, path: path.write_bytes(b""),
    "missing": lambda chance, path: path.unlink(),
    "absurd": absurd,
    "half deleted": lambda chance, path: shutil.rmtree(path.parent),
}


def damaged_checkpoints(chance: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Damages files of the newest of two checkpoints: either it does no harm, or the one before is
    used.
    """
    (folder / "tiny.py").write_text(TINY)
    small = [f"--config={folder}/tiny.py", f"--workdir={folder}/good", "--config.evals.val.every=0"]
    expect(train.main([*small, "--config.total_steps=8"]) == 0, "the run fails")
    good, config = (
        folder / "good/checkpoints",
        ml_collections.ConfigDict(dict(keep_last=2, keep_every=0, keep_best="", max_failures=3)),
    )
    saved = {step: read(good, step) for step in (4, 8)}
    # Those of the arrays are the largest, and few: they would hardly be hit.
    files = [path.relative_to(good) for path in sorted((good / "8").rglob("*")) if path.is_file()]
    large = [path for path in files if (good / path).stat().st_size > 1000]
    layout, harmless, refused = layout_of(f"{folder}/tiny.py"), 0, 0
    for number in range(count):
        bad = folder / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        name = list(DAMAGES)[number % len(DAMAGES)]
        DAMAGES[name](chance, bad / chance.choice(large if chance.random() < 0.6 else files))
        is_there = (bad / "8").is_dir()
        try:
            params = flatten(checkpoint.read_params(bad / "8"))
            wrong = [
                key for key in params if not np.array_equal(params[key], saved[8][f"params/{key}"])
            ]
            expect(not wrong, f"{name}: {wrong} were read, and are wrong")
        except UserError as error:
            expect(
                len(str(error).splitlines()) == 1 and "can't be used" in str(error),
                f"{name}: {error}",
            )
        with Checkpointer(bad, config) as checkpointer:
            step, state = checkpointer.restore(lambda meta: layout)
        found = flatten(jax.device_get(state))
        wrong = [key for key in saved[step] if not np.array_equal(found[key], saved[step][key])]
        expect(not wrong, f"{name}: {wrong} were restored, and are wrong")
        expect((step == 4 and is_there) == (bad / "damaged_8").is_dir(), f"{name}: restored {step}")
        harmless, refused = harmless + (step == 8), refused + (step == 4)
    return dict(tried=count, set_aside=refused, harmless=harmless)


def read(folder: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """A sound state by names of leaves, read without our code."""
    import orbax.checkpoint as ocp

    with warnings.catch_warnings(
        action="ignore", category=UserWarning
    ):  # of the topology, which is the same
        tree = ocp.PyTreeCheckpointer().restore(folder / str(step) / "state")
    return {key: np.asarray(value) for key, value in flatten(tree).items()}


def layout_of(tiny: str) -> dict:
    """Shapes of the state of a run of a config, for the devices here."""
    config = configs.load(tiny)
    model = experiment.make_model(config, 10)
    tx, _ = experiment.make_optimizer(config, model, config.total_steps)
    return states.as_dict(states.abstract_state(config, model, tx, meshes.make_mesh(config.mesh)))


def photo(chance, mode: str = "RGB", size=(40, 30)) -> Image.Image:
    """A smooth picture with some grain."""
    rng = np.random.default_rng(chance.randrange(2**32))
    small = Image.fromarray(rng.integers(0, 255, (6, 8, 3), np.uint8)).resize(
        size, Image.Resampling.BICUBIC
    )
    grain = rng.integers(-9, 9, (size[1], size[0], 3))
    return Image.fromarray(np.clip(np.asarray(small) + grain, 0, 255).astype(np.uint8)).convert(
        mode
    )


def encoded(image: Image.Image, form: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def cut(chance, raw: bytes) -> bytes:
    return raw[: chance.randrange(2, len(raw) - 20)]


def overwritten(chance, raw: bytes) -> bytes:
    start = chance.randrange(len(raw) - 40)
    return raw[:start] + chance.randbytes(40) + raw[start + 40 :]


def bomb(chance) -> bytes:
    """A PNG whose header declares ten thousand million pixels."""
    raw = bytearray(encoded(photo(chance), "PNG"))
    raw[16:24] = (100_000).to_bytes(4, "big") * 2
    return bytes(raw)


def deep(chance) -> bytes:
    gray = (
        np.random.default_rng(chance.randrange(99)).integers(0, 65535, (30, 40)).astype(np.uint16)
    )
    return encoded(Image.fromarray(gray), "PNG")


def rotated(chance) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(photo(chance), "JPEG", exif=exif)


def animated(chance) -> bytes:
    frames = [photo(chance, "P") for _ in range(3)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50)


# Kind -> (ending, f(chance) -> bytes, is it an image: True, False, or None where it depends).
KINDS = {
    "cut JPEG": ("jpg", lambda chance: cut(chance, encoded(photo(chance), "JPEG")), False),
    "cut PNG": ("png", lambda chance: cut(chance, encoded(photo(chance), "PNG")), False),
    "overwritten JPEG": (
        "jpg",
        lambda chance: overwritten(chance, encoded(photo(chance), "JPEG")),
        None,
    ),
    "overwritten PNG": (
        "png",
        lambda chance: overwritten(chance, encoded(photo(chance), "PNG")),
        None,
    ),
    "empty": ("jpg", lambda chance: b"", False),
    "noise": ("jpg", lambda chance: chance.randbytes(900), False),
    "a text": ("png", lambda chance: b"<html>404 Not Found</html>" * chance.randrange(1, 9), False),
    "decompression bomb": ("png", bomb, False),
    "PNG named JPEG": ("jpg", lambda chance: encoded(photo(chance), "PNG"), True),
    "CMYK": ("jpg", lambda chance: encoded(photo(chance, "CMYK"), "JPEG"), True),
    "16-bit": ("png", deep, True),
    "animated, palette": ("gif", animated, True),
    "palette": ("png", lambda chance: encoded(photo(chance, "P"), "PNG"), True),
    "turned by EXIF": ("jpg", rotated, True),
    "grey with alpha": ("png", lambda chance: encoded(photo(chance, "LA"), "PNG"), True),
}


def pixels_of(root: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[int, str]]:
    """(pixels by path, reasons of those skipped by path) that a pass over a folder gives."""
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


def damaged_images(chance: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Damaged and unusual images among sound ones: those that are none are skipped and named, no
    other one moves.
    """
    root, kinds = folder / "data/train", {}
    sound = max(20, count // 5)
    for number in range(sound):
        path = root / ("cat", "dog")[number % 2] / f"sound_{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(chance), "JPEG"))
    before, bad = pixels_of(root.parent)
    expect(len(before) == sound and not bad, f"sound images were skipped: {bad}")
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        ending, make, _ = KINDS[kind]
        path = (
            root / chance.choice(("cat", "dog")) / f"{chance.randrange(10**6):06}_{number}.{ending}"
        )
        path.write_bytes(make(chance))
        kinds[str(path)] = kind
    after, bad = pixels_of(root.parent)
    expect(len(after) + len(bad) == sound + count, "images are missing")
    expect(
        all(np.array_equal(after[path], image) for path, image in before.items()),
        "sound images changed",
    )
    for path, kind in kinds.items():
        usable = KINDS[kind][2]
        expect(
            usable is None or usable == (path in after),
            f"{kind}: {path} is {bad.get(path, 'used')}",
        )
        if path in after and usable:
            with Image.open(path) as image:
                wanted = image.convert("RGB").resize((16, 16), Image.Resampling.BILINEAR)
            wanted = np.asarray(wanted, np.float32)
            off = np.abs(np.asarray(after[path], np.float32) - wanted).mean()
            expect(
                kind == "16-bit" or off < 40,
                f"{kind}: {path} is off by {off:.0f} levels on average",
            )
        expect(path in after or len(bad[path].splitlines()) <= 1, bad.get(path))
    return dict(tried=count, used=len(after) - sound, skipped=len(bad))
