"""Batches are a pure function of (config, seed, step): order, pixels, padding, failures, and the
transfer to the devices.
"""

import errno
import itertools
import logging
import os

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax.sharding import NamedSharding, PartitionSpec
from PIL import Image

from vit_jax import config as configs
from vit_jax.data import order, pipeline, skipped, to_device
from vit_jax.data.sources import open as sources
from vit_jax.data.sources import storage
from vit_jax.data.sources.listing import InMemory, Listing
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.errors import Unavailable, UserError

SIDE = 16


def train_config(batch_size: int, seed: int = 0, **data):
    config = configs.defaults()
    config.seed, config.image_size, config.data.batch_size = seed, SIDE, batch_size
    config.data.update(data)
    return config


def eval_config(crop="resize"):
    config = configs.defaults()
    config.data = configs.eval_defaults()["data"]
    config.data.crop = crop
    return config.data


def memory_source(pictures: np.ndarray, labels=None) -> Listing:
    """PNG files in memory; by default every example is a class of its own."""
    labels = np.arange(len(pictures)) if labels is None else np.asarray(labels)
    names = [str(i) for i in range(labels.max() + 1)]
    return InMemory(
        name="picture",
        files=[tf.io.encode_png(picture).numpy() for picture in pictures],
        all_labels=labels,
        splits={},
        class_names=names,
        num_classes=len(names),
        fingerprint="pictures",
    )


def noise(count: int, height=SIDE, width=SIDE) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)


def train(source, config, start=0, stop=4, rows=None) -> list[dict]:
    rows = np.arange(config.data.batch_size) if rows is None else np.asarray(rows)
    return list(pipeline.train_pipeline(config, source, rows, stop).batches(start))


def assert_same(found: list[dict], wanted: list[dict]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert set(one) == set(other) == {"image", "label", "mask", "id", "seed"}
        for name in one:
            assert one[name].dtype == other[name].dtype
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def joined(batches: list[dict], name: str) -> np.ndarray:
    return np.concatenate([batch[name] for batch in batches])


PINNED = [675, 228, 555, 589, 449, 542, 765, 204, 68, 554, 766, 744]
PINNED_SMALL = [2, 1, 0, 4, 3, 4, 0, 2, 3, 1]


def first_ids(num_examples: int, count: int, seed: int) -> np.ndarray:
    """The first `count` example ids of a run."""
    items = tf.function(order.train_items([(num_examples, 1.0)], count, np.arange(count), seed))
    return items(tf.constant(0, tf.int64))["index"].numpy()


@pytest.mark.parametrize(
    "num_examples, batch_size",
    [(1, 4), (2, 3), (3, 8), (7, 3), (8, 8), (10, 16), (100, 33), (257, 64)],
)
def test_every_epoch_is_a_permutation(num_examples, batch_size):
    items = order.train_items([(num_examples, 1.0)], batch_size, np.arange(batch_size), seed=5)
    steps = -(-5 * num_examples // batch_size)
    found = [items(tf.constant(step, tf.int64)) for step in range(steps)]
    ids, epoch, mask = (
        np.concatenate([part[name] for part in found])[: 5 * num_examples]
        for name in ("index", "epoch", "mask")
    )
    np.testing.assert_array_equal(epoch, np.repeat(np.arange(5), num_examples))
    np.testing.assert_array_equal(np.sort(ids.reshape(5, num_examples)), [range(num_examples)] * 5)
    assert mask.all()
    if num_examples >= 100:
        assert len(np.unique(ids.reshape(5, num_examples), axis=0)) == 5  # every epoch has its own


def test_order_is_pinned():
    """A run that is continued after an update of TensorFlow must go on in the same order: these ids
    may not change.
    """
    assert first_ids(1000, 12, seed=42).tolist() == PINNED
    assert first_ids(5, 10, seed=0).tolist() == PINNED_SMALL


def chi_square(table: np.ndarray) -> float:
    """Standard deviations by which the chi-square statistic of a contingency table exceeds that of
    independence.
    """
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    return (((table - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "num_examples, batch_size, classes", [(1077, 32, 10), (10_000, 100, 10), (65_536, 256, 16)]
)
def test_batches_of_a_sorted_data_set_are_mixed(num_examples, batch_size, classes):
    for seed in (0, 1):
        ids = first_ids(num_examples, num_examples, seed)
        labels = ids * classes // num_examples
        labels = labels[: num_examples // batch_size * batch_size].reshape(-1, batch_size)
        table = np.stack([np.bincount(row, minlength=classes) for row in labels])
        # Four rounds of the shuffle fail this: the order of 65,536 examples is too even by 15
        # standard deviations.
        assert abs(chi_square(table)) < 4
        # Neighbours are not kept together.
        assert abs(np.corrcoef(ids[1:], ids[:-1])[0, 1]) < 4 / np.sqrt(num_examples)


def test_all_orders_are_equally_likely():
    """RandomIndexShuffle, given seed and epoch as they are, repeats itself after 256 epochs or
    seeds.
    """
    orders = first_ids(4, 4 * 1000, seed=3).reshape(-1, 4)
    counts = np.unique(orders @ [64, 16, 4, 1], return_counts=True)[1]
    assert len(counts) == 24
    # Chi-square with 23 degrees of freedom, p = 0.001.
    assert ((counts - 1000 / 24) ** 2 / (1000 / 24)).sum() < 49.7
    orders = first_ids(50, 50 * 600, seed=0).reshape(-1, 50)
    assert abs(chi_square(np.stack([np.bincount(place, minlength=50) for place in orders.T]))) < 4
    assert len(np.unique(orders, axis=0)) == 600
    seeds = [0, 1, 256, 257, 1024, 65_536, 2**31 - 1]
    assert len({tuple(first_ids(50, 50, seed)) for seed in seeds}) == len(seeds)


def test_batches_are_a_function_of_seed_and_step():
    source = memory_source(noise(10, 24, 20))
    config = train_config(6, seed=7)
    whole = train(source, config, stop=8)  # epochs end inside of steps 1, 3 and 4
    assert whole[0]["image"].shape == (6, SIDE, SIDE, 3) and whole[0]["image"].dtype == np.uint8
    for batch in whole:
        np.testing.assert_array_equal(batch["label"], batch["id"])  # the label belongs to the id
        assert batch["label"].dtype == np.int32 and batch["mask"].all()
    ids = joined(whole, "id")[:40].reshape(4, 10)
    np.testing.assert_array_equal(np.sort(ids), [range(10)] * 4)
    for start in (1, 5, 8):
        assert_same(train(source, config, start=start, stop=8), whole[start:])
    assert_same(train(source, train_config(6, seed=7, threads=1), stop=8), whole)
    other = train(source, train_config(6, seed=8), stop=8)
    assert not np.array_equal(joined(other, "id"), joined(whole, "id"))


def test_batch_larger_than_the_data_set():
    source = memory_source(noise(3))
    config = train_config(8, crop="resize")
    whole = train(source, config, stop=3)
    np.testing.assert_array_equal(np.sort(joined(whole, "id").reshape(8, 3)), [range(3)] * 8)
    np.testing.assert_array_equal(joined(whole, "image"), noise(3)[joined(whole, "id")])
    assert_same(train(source, config, start=2, stop=3), whole[2:])


@pytest.mark.parametrize(
    "parts", [[[0, 1, 2], [3, 4, 5]], [[0, 5], [1, 2, 3, 4]], [[1], [0, 2, 4], [3, 5]]]
)
def test_processes_read_slices_of_one_global_batch(parts):
    source, config = memory_source(noise(8, 24, 24)), train_config(6, seed=1)
    whole = train(source, config, start=1, stop=4)
    for rows in parts:
        wanted = [{name: value[rows] for name, value in batch.items()} for batch in whole]
        assert_same(train(source, config, start=1, stop=4, rows=rows), wanted)


def test_every_example_and_epoch_has_its_own_augmentation():
    pictures = np.repeat(noise(1, 48, 48), 12, axis=0)  # the same picture twelve times
    batches = train(memory_source(pictures), train_config(12), stop=4)
    assert len(np.unique(joined(batches, "image"), axis=0)) == 48
    seeds = joined(batches, "seed")
    assert seeds.dtype == np.int32 and len(np.unique(seeds, axis=0)) == 48


def test_crops_of_pngs_and_jpegs_are_the_same_windows(tmp_path):
    """Of a JPEG, only the crop is decoded; the crop must be that of other formats."""
    rng = np.random.default_rng(0)
    for i in range(6):
        small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
        picture = small.resize((90, 70), Image.Resampling.BICUBIC)
        formats = ("png", "png", {}), ("jpeg", "JPG", dict(quality=100, subsampling=0))
        for kind, name, options in formats:
            (tmp_path / kind / "a").mkdir(parents=True, exist_ok=True)
            picture.save(tmp_path / kind / "a" / f"{i}.{name}", **options)
    config = train_config(6, seed=2)
    png, jpeg = (
        train(sources.open_source(f"folder:{tmp_path}/{kind}", "train"), config)
        for kind in ("png", "jpeg")
    )
    np.testing.assert_array_equal(joined(png, "id"), joined(jpeg, "id"))
    difference = np.abs(joined(png, "image").astype(int) - joined(jpeg, "image"))
    # The loss of JPEG at quality 100; other windows would differ by 60.
    assert difference.max() <= 8 and difference.mean() < 1.5


@pytest.mark.parametrize(("given", "size"), [({}, 14), (dict(fraction=0.75), 12)])
def test_random_crops_are_windows_of_seven_eighths_or_another_fraction(given, size):
    config = train_config(12, crop="random", **given)
    config.image_size = size
    pictures = noise(6)  # 16 is 14 * 8 / 7: nothing is resized
    for batch in train(memory_source(pictures), config):
        for image, i in zip(batch["image"], batch["id"], strict=True):
            corners = itertools.product(range(17 - size), range(17 - size))
            windows = [pictures[i, y : y + size, x : x + size] for y, x in corners]
            assert any(
                np.array_equal(image, window) or np.array_equal(image, window[:, ::-1])
                for window in windows
            )


def test_far_steps_are_reached_directly():
    source, config = memory_source(noise(10)), train_config(6)
    far = train(source, config, start=10**6, stop=10**6 + 5)  # 6 * 10^6 is the start of an epoch
    np.testing.assert_array_equal(np.sort(joined(far, "id").reshape(3, 10)), [range(10)] * 3)
    assert_same(train(source, config, start=10**6 + 3, stop=10**6 + 5), far[3:])


@pytest.mark.parametrize("num_examples", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("batch_size", [1, 8, 16])
def test_evaluation_reads_every_example_once(num_examples, batch_size):
    pictures = noise(num_examples)
    source = memory_source(pictures)
    host = pipeline.eval_pipeline(
        eval_config(), source, np.arange(batch_size), batch_size, SIDE, "error"
    )
    batches = list(host.batches())
    assert len(batches) == host.steps
    assert all(batch["image"].shape[0] == batch_size for batch in batches)
    ids, mask = joined(batches, "id"), joined(batches, "mask")
    assert mask.dtype == np.float32 and len(mask) - num_examples < batch_size
    np.testing.assert_array_equal(mask, np.arange(len(mask)) < num_examples)  # padding comes last
    np.testing.assert_array_equal(ids[mask == 1], np.arange(num_examples))
    np.testing.assert_array_equal(joined(batches, "label")[mask == 1], np.arange(num_examples))
    np.testing.assert_array_equal(joined(batches, "image")[mask == 1], pictures)
    assert_same(list(host.batches()), batches)  # again from the start


def test_evaluation_rows_of_processes():
    source = memory_source(noise(11))

    def read(rows):
        rows = np.asarray(rows)
        host = pipeline.eval_pipeline(eval_config(), source, rows, 8, SIDE, "error")
        return list(host.batches())

    whole = read(range(8))
    for rows in ([0, 1, 6, 7], [2, 3, 4, 5]):
        wanted = [{name: value[rows] for name, value in batch.items()} for batch in whole]
        assert_same(read(rows), wanted)


def test_central_crop_takes_the_middle():
    pictures = noise(3, 32, 49)  # 32 is 28 / 0.875: nothing is resized
    host = pipeline.eval_pipeline(
        eval_config("central"), memory_source(pictures), np.arange(3), 3, 28, "error"
    )
    np.testing.assert_array_equal(joined(list(host.batches()), "image"), pictures[:, 2:30, 10:38])


def photo(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (40, 50, 3), np.uint8))


@pytest.fixture
def photos(tmp_path):
    """20 JPEGs of one class."""
    (tmp_path / "a").mkdir()
    for i in range(20):
        photo(i).save(tmp_path / "a" / f"{i:02}.jpg")
    return tmp_path


def damage(path, kind: str) -> None:
    data = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(data[: len(data) * 9 // 10])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("this is not an image, although its name says so")
    elif kind == "page":
        path.write_text("<html>404</html>" * 100)
    elif kind == "short":
        path.write_bytes(data[:3])
    elif kind == "one byte":
        path.write_bytes(data[:1])
    elif kind == "huge":
        path.write_bytes(declaring(data, 65_000))
    elif kind == "huge png":
        header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + 2 * (10**6).to_bytes(4, "big")
        path.write_bytes(header + b"\x08\2\0\0\0" + data)
    elif kind == "gone":
        path.unlink()


def declaring(jpeg: bytes, side: int) -> bytes:
    """A JPEG whose header declares other sides."""
    at = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:at] + 2 * side.to_bytes(2, "big") + jpeg[at + 4 :]


def opened(folder):
    return sources.open_source(f"folder:{folder}", "train")


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("empty", "page", "short", "huge")]


@pytest.mark.parametrize("kind", ["truncated", "text", "one byte", "huge png", *SLOW])
def test_damage_is_an_error_that_names_the_file(photos, kind):
    source = opened(photos)
    number = next(i for i in range(20) if source.describe(i).endswith("07.jpg"))
    damage(photos / "a/07.jpg", kind)
    config = train_config(8, seed=3)
    place = int(np.argmax(first_ids(20, 20, seed=3) == number))
    host = pipeline.train_pipeline(config, source, np.arange(8), 4)
    batches = host.batches()
    for _ in range(place // 8):
        next(batches)  # those before the damage are read
    with pytest.raises(UserError) as caught:
        next(batches)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert str(photos / "a/07.jpg") in text and f"step {place // 8}" in text
    assert "data.on_corrupt=skip" in text
    evaluation = pipeline.eval_pipeline(eval_config(), source, np.arange(8), 8, SIDE, "error")
    with pytest.raises(UserError, match=r"a/07\.jpg"):
        list(evaluation.batches())


def test_a_truncated_jpeg_fails_whatever_part_a_crop_needs(photos):
    """Crops near the top could be decoded, which would let the file pass in some epochs."""
    source = opened(photos)
    damage(photos / "a/07.jpg", "truncated")
    config = train_config(20, area_min=0.05, on_corrupt="skip", threads=40)
    batches = train(source, config, stop=8)
    assert [int(batch["mask"].sum()) for batch in batches] == [19] * 8


@pytest.mark.parametrize("batch_size", [8, 48])
def test_damage_is_skipped_and_the_rest_stays(photos, caplog, batch_size):
    source = opened(photos)
    whole = train(source, train_config(batch_size, seed=3))
    assert_same(train(source, train_config(batch_size, seed=3, on_corrupt="skip")), whole)

    kinds = {2: "truncated", 3: "empty", 11: "text", 12: "page"}
    names = {f"{photos}/a/{i:02}.jpg" for i in kinds}
    for i, kind in kinds.items():
        damage(photos / f"a/{i:02}.jpg", kind)
    damaged = [i for i in range(20) if source.describe(i) in names]
    host = pipeline.train_pipeline(
        train_config(batch_size, seed=3, on_corrupt="skip"), source, np.arange(batch_size), 4
    )
    with caplog.at_level(logging.WARNING, logger="vit_jax"):
        found = list(host.batches())
    for batch, wanted in zip(found, whole, strict=True):
        np.testing.assert_array_equal(batch["id"], wanted["id"])
        bad = np.isin(batch["id"], damaged)
        np.testing.assert_array_equal(batch["mask"], np.where(bad, 0, 1))
        np.testing.assert_array_equal(batch["image"][~bad], wanted["image"][~bad])
        np.testing.assert_array_equal(batch["label"][~bad], wanted["label"][~bad])
        assert not batch["image"][bad].any()
    assert host.skipped.keys() == set(damaged)
    named = [record.getMessage() for record in caplog.records if record.name.startswith("vit_jax")]
    assert len(named) == 4 and all(sum(name in text for text in named) == 1 for name in names)


def test_damage_at_the_end_of_an_evaluation_is_counted_once(photos):
    """Padding repeats the last example, which here is damaged."""
    source = opened(photos)
    order_ = [source.describe(i) for i in range(20)]
    damage(photos / "a" / order_[19].rpartition("/")[2], "truncated")
    host = pipeline.eval_pipeline(eval_config(), source, np.arange(16), 16, SIDE, "skip")
    batches = list(host.batches())
    np.testing.assert_array_equal(joined(batches, "mask"), [1] * 19 + [0] * 13)
    assert host.skipped.keys() == {19}


def test_an_image_that_resizing_would_blow_up_is_damage():
    thin = memory_source(np.zeros((1, 1, 30_000, 3), np.uint8))
    central = eval_config("central")
    with pytest.raises(UserError, match=r"picture number 0 can't be read.*too long and thin"):
        list(pipeline.eval_pipeline(central, thin, np.arange(1), 1, 224, "error").batches())


@pytest.mark.parametrize("on_corrupt", ["error", "skip"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [("ENOENT", UserError), ("EACCES", UserError), ("EIO", Unavailable), ("ESTALE", Unavailable)],
)
def test_an_error_of_the_file_system_is_no_damaged_image(
    photos, monkeypatch, on_corrupt, code, kind
):
    source = opened(photos)
    number = getattr(errno, code)
    name = str(photos / "a/07.jpg")
    read_all = storage.read_all

    def fails(paths):
        if name in paths:
            raise OSError(number, os.strerror(number), name)
        return read_all(paths)

    monkeypatch.setattr(storage, "read_all", fails)
    host = pipeline.eval_pipeline(eval_config(), source, np.arange(8), 8, SIDE, on_corrupt)
    reason = rf"a/07\.jpg can't be read .*{os.strerror(number)}.*: the file system failed"
    with pytest.raises(UserError, match=reason) as caught:
        list(host.batches())
    assert type(caught.value) is kind


def test_a_run_ends_if_more_than_half_of_its_latest_examples_are_skipped(photos, monkeypatch):
    monkeypatch.setattr(skipped, "RECENT", 40)
    source = opened(photos)
    config = train_config(10, on_corrupt="skip")
    for i in range(8):
        damage(photos / f"a/{i:02}.jpg", "empty")
    assert sum(int(batch["mask"].sum()) for batch in train(source, config, stop=20)) == 120
    for i in range(8, 12):
        damage(photos / f"a/{i:02}.jpg", "empty")
    with pytest.raises(UserError, match=r"2\d of the last 40 examples can't be used, such as"):
        train(source, config, stop=20)


@pytest.mark.parametrize("label", [-1, 4])
def test_a_label_out_of_range_is_an_error_or_is_skipped(label):
    source = memory_source(noise(4), [0, 1, label, 3])
    source.num_classes = 4
    with pytest.raises(
        UserError, match=r"picture number 2 can't be read.*the label is not a class"
    ):
        train(source, train_config(4))
    for batch in train(source, train_config(4, on_corrupt="skip")):
        np.testing.assert_array_equal(batch["mask"], batch["id"] != 2)


def test_a_failing_read_names_the_record():
    source = memory_source(noise(4))
    whole = source.read

    def read(numbers):
        if 2 in numbers:
            raise OSError("Input/output error")
        return whole(numbers)

    source.read = read
    with pytest.raises(UserError, match="picture number 2 can't be read"):
        train(source, train_config(4))


MESHES = {
    "data": dict(data=8),
    "mixed": dict(data=2, fsdp=2, tensor=2),
    "tensor": dict(data=1, tensor=8),
}


def mesh_of(**sizes):
    return meshes.make_mesh(dict(replica=1, data=1, fsdp=1, tensor=1) | sizes)


@pytest.mark.parametrize("name", MESHES)
def test_global_batch_lies_where_the_mesh_says(name):
    assert jax.device_count() == 8
    mesh = mesh_of(**MESHES[name])
    rng = np.random.default_rng(0)
    local = dict(
        image=rng.integers(0, 256, (16, 4, 5, 3), np.uint8), label=np.arange(16, dtype=np.int32)
    )
    found = to_device.global_batch(local, mesh, np.arange(16), 16)
    splits = mesh.shape["data"] * mesh.shape["fsdp"]
    for key, value in local.items():
        assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype)
        wanted = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        assert found[key].sharding.is_equivalent_to(wanted, value.ndim)
        np.testing.assert_array_equal(found[key], value)
        for shard in found[key].addressable_shards:
            ((_, data, fsdp, _),) = np.argwhere(mesh.devices == shard.device)
            part = (data * mesh.shape["fsdp"] + fsdp) * 16 // splits
            np.testing.assert_array_equal(shard.data, value[part : part + 16 // splits])


def test_global_batch_finds_the_rows_of_a_process(monkeypatch):
    """A process that feeds rows 4-7 and 12-15 of 16, as where its devices are not neighbours in the
    mesh.
    """
    rows = np.array([4, 5, 6, 7, 12, 13, 14, 15])
    asked = [slice(4, 6), slice(6, 8), slice(12, 14), slice(14, 16)]

    def build(shape, place, shard):
        assert shape == (16, 2)
        return [shard((part, slice(None))) for part in asked]

    monkeypatch.setattr(jax, "make_array_from_callback", build)
    values = np.arange(32).reshape(16, 2)
    found = to_device.global_batch(dict(x=values[rows]), mesh_of(data=8), rows, 16)
    np.testing.assert_array_equal(np.concatenate(found["x"]), values[rows])


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_to_device_keeps_order_and_reads_no_further_than_asked(prefetch):
    mesh, taken = mesh_of(data=8), []

    def batches():
        for step in range(4):
            taken.append(step)
            rest = dict(label=np.arange(8), mask=np.ones(8), id=np.arange(8), seed=np.zeros((8, 2)))
            yield dict(image=np.full((8, 1), step)) | rest

    for step, batch in enumerate(to_device.to_device(batches(), mesh, np.arange(8), 8, prefetch)):
        assert set(batch) == {"image", "label", "mask", "seed"}
        assert np.unique(batch["image"]).tolist() == [step]
        assert len(taken) == min(step + prefetch, 4)
    assert taken == [0, 1, 2, 3]


def test_the_whole_way_from_files_to_devices(photos):
    mesh, source, config = mesh_of(data=4, tensor=2), opened(photos), train_config(8)
    rows = sharding.local_rows(mesh, 8)
    host = pipeline.train_pipeline(config, source, rows, 3)
    placed = list(to_device.to_device(host.batches(1), mesh, rows, 8, 2))
    for batch, wanted in zip(placed, train(source, config, start=1, stop=3), strict=True):
        np.testing.assert_array_equal(batch["image"], wanted["image"])
        np.testing.assert_array_equal(batch["label"], wanted["label"])
