"""Records on a store: what is asked for, and that it is what local files give."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
from array_record.python import array_record_module
from array_record.python.array_record_data_source import ArrayRecordDataSource
from conftest import ROOT
from test_pipeline import SIDE, assert_same, eval_config, memory_source, noise, train_config
from test_sources import prepare_cifar10

from vit_jax.data import pipeline, read_ahead
from vit_jax.data.sources import array_record, object_file, simulated_store, spans, storage
from vit_jax.data.sources import open as sources
from vit_jax.distributed import runtime
from vit_jax.errors import UserError

OPTIONS = (
    "group_size:1",
    "group_size:1,uncompressed",
    "group_size:7",
    "group_size:3,uncompressed",
    "group_size:1000,zstd:9",
    "group_size:1,pad_to_block_boundary:true",
    "group_size:5,uncompressed,pad_to_block_boundary:true",
)
BLOCK = 1 << 16  # of the format, with a header of 24 bytes; a chunk's has 40
SIZES = {
    "empty": [0] * 5,
    "small": range(0, 400, 3),
    "a block": range(BLOCK - 100, BLOCK + 10, 3),
    "large": [5_000_000, 0, 1, BLOCK - 24, BLOCK - 25, BLOCK - 64, 2 * BLOCK, 200_000],
}


@pytest.fixture
def store(monkeypatch):
    """Local files are read as if they were on a store."""
    simulated = simulated_store.Simulated(0.0, 4)
    monkeypatch.setattr(storage, "simulated", simulated)
    yield simulated
    simulated.pool.shutdown()


def write_records(path, records: list[bytes], options: str) -> SimpleNamespace:
    """Writes a file by the library of the format; returns an instruction to read it."""
    writer = array_record_module.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    count = len(records)
    return SimpleNamespace(filename=str(path), skip=0, take=count, examples_in_shard=count)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("options", OPTIONS)
def test_array_record_files_are_read_as_the_library_reads_them(tmp_path, store, options, sizes):
    rng = np.random.default_rng(0)
    records = [rng.bytes(n) if n % 2 else b"ab" * (n // 2) for n in SIZES[sizes]]
    part = write_records(tmp_path / "x.array_record", records, options)
    library = ArrayRecordDataSource([part])
    order = rng.permutation(len(records)).tolist()
    ours = array_record.Records([part])
    assert ours.read(order) == [library[i] for i in order] == [records[i] for i in order]
    assert ours.read(order[:1]) == [records[order[0]]]


def test_parts_of_array_record_files_are_those_of_tfds(tmp_path, store):
    first = write_records(tmp_path / "0", [b"%d" % i for i in range(10)], "group_size:4")
    second = write_records(tmp_path / "1", [b"%d" % i for i in range(10, 15)], "group_size:4")
    first.skip, first.take, second.take = 3, 7, 2
    records = array_record.Records([first, second])
    assert records.read(range(9)) == [b"%d" % i for i in range(3, 12)]


@pytest.mark.parametrize(
    "options, what",
    [("brotli", "Brotli"), ("snappy", "Snappy"), ("transpose:true", "transposed chunks")],
)
def test_what_is_not_supported_is_named(tmp_path, store, options, what):
    part = write_records(tmp_path / "x", [b"record" * 100] * 20, f"group_size:2,{options}")
    with pytest.raises(UserError, match=f"x has .*{what}.*local disk"):
        array_record.Records([part])


@pytest.mark.parametrize("kind", ["short", "cut", "noise", "another", "fewer"])
def test_damaged_array_record_files_are_named(tmp_path, store, kind):
    part = write_records(tmp_path / "x", [b"record" * 1000] * 20, "group_size:1")
    content = (tmp_path / "x").read_bytes()
    damaged = dict(
        short=b"x" * 100,
        cut=content[:BLOCK],
        noise=np.random.default_rng(0).bytes(3 * BLOCK),
        another=bytes(3 * BLOCK),
        fewer=content,
    )
    (tmp_path / "x").write_bytes(damaged[kind])
    part.examples_in_shard += kind == "fewer"
    with pytest.raises(UserError, match=r"x (is damaged|has 20 records).*prepare"):
        array_record.Records([part])


def test_neighbours_are_read_together():
    """Every record is in its request; what is read besides is bounded."""
    rng = np.random.default_rng(0)
    for size, count in ((100_000, 300), (3_000, 2000), (3_000_000, 40), (10, 500)):
        lengths = rng.integers(0, 2 * size, 3000)
        starts = np.cumsum(lengths) - lengths
        files = np.repeat([0, 1, 2], 1000)
        numbers = rng.permutation(3000)[:count]
        numbers[:5] = numbers[5:10]  # the same image several times
        places = np.stack([starts, lengths], axis=1)[numbers]
        requests = spans.plan(files[numbers], places)
        assert sorted(i for r in requests for i in r.records) == list(range(count))
        for request in requests:
            inside = places[request.records]
            assert (files[numbers[request.records]] == request.file).all()
            assert request.start == inside[:, 0].min()
            assert request.stop == inside.sum(axis=1).max()
            assert len(inside) == 1 or request.stop - request.start <= spans.MAX_REQUEST
        asked = np.unique(places, axis=0)[:, 1].sum()
        read = sum(request.stop - request.start for request in requests)
        assert read - asked <= spans.GAP_BYTES_PER_RECORD * count
    assert len(requests) == 3  # all of the small ones, which are in three files
    in_order = np.stack([np.arange(100) * 100_000, np.full(100, 100_000)], axis=1)
    assert len(spans.plan(np.zeros(100, int), in_order)) == 2  # of 8 MiB at most


@pytest.fixture(scope="module", params=["tfrecord", "array_record", "tars"])
def prepared(request, tmp_path_factory):
    """(name, data_dir) of a small data set in each format."""
    folder = tmp_path_factory.mktemp(request.param)
    cifar10 = folder if request.param != "tars" else tmp_path_factory.mktemp("cifar10")
    prepare_cifar10(cifar10, "tfrecord" if request.param == "tars" else request.param)
    if request.param != "tars":
        return "cifar10", str(folder)
    source = sources.open_source("cifar10", "train", str(cifar10))
    for shard in range(3):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for i in range(shard, len(source), 3):
                image, label = source.example(i)
                for suffix, content in (("png", image), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{i}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return f"tars:{folder}", ""


def batches_from(name: str, data_dir: str, on_corrupt="error", start=0, stop=10**6):
    source = sources.open_source(name, "train", data_dir)
    config = train_config(16, seed=2, on_corrupt=on_corrupt)
    return pipeline.train_pipeline(config, source, np.arange(16), stop).batches(start)


def batches_of(name: str, data_dir: str, on_corrupt="error", start=0) -> list[dict]:
    return list(batches_from(name, data_dir, on_corrupt, start, 5))


@pytest.mark.parametrize("on_corrupt", ["error", "skip"])
def test_batches_are_those_of_local_files(prepared, monkeypatch, on_corrupt):
    local = batches_of(*prepared)
    monkeypatch.setattr(pipeline, "READ_AT_ONCE_DISTANT", 7)
    simulated = simulated_store.Simulated(0.001, 4)
    monkeypatch.setattr(storage, "simulated", simulated)
    assert_same(batches_of(*prepared, on_corrupt), local)
    assert_same(batches_of(*prepared, on_corrupt, start=3), local[3:])
    simulated.pool.shutdown()


def test_requests_are_few(prepared, store):
    """One for each shard: its records are neighbours."""
    source = sources.open_source(prepared[0], "train", prepared[1])
    data = eval_config()
    before = store.requests
    host = pipeline.eval_pipeline(data, source, np.arange(16), 16, 8, "error")
    assert sum(batch["mask"].sum() for batch in host.batches()) == 47
    assert store.requests - before == 3


def shards_of(folder) -> list:
    return sorted(path for path in folder.rglob("*") if path.suffix != ".json" and path.is_file())


@pytest.fixture
def copied(prepared, tmp_path):
    """(name, data_dir, a shard) of a copy of the data set, to be damaged."""
    name, data_dir = prepared
    source = data_dir or name.partition(":")[2]
    shutil.copytree(source, tmp_path / "data")
    shard = next(path for path in shards_of(tmp_path / "data") if "test" not in path.name)
    if data_dir:
        return name, str(tmp_path / "data"), shard
    return f"tars:{tmp_path / 'data'}", "", shard


@pytest.mark.parametrize("on_corrupt", ["error", "skip"])
def test_a_file_that_changes_during_a_run_is_no_damaged_image(copied, store, on_corrupt):
    name, data_dir, shard = copied
    source = sources.open_source(name, "train", data_dir)
    config = train_config(16, on_corrupt=on_corrupt)
    shard.write_bytes(shard.read_bytes() + b"\0")
    host = pipeline.train_pipeline(config, source, np.arange(16), 4)
    indices = set(runtime.folder().glob("*.npz"))
    with pytest.raises(UserError) as caught:
        list(host.batches())
    assert str(caught.value).startswith(f"{shard} has changed since it was indexed")
    assert not host.skipped
    assert len(indices - set(runtime.folder().glob("*.npz"))) == 1  # the outdated one is removed


@pytest.mark.slow
def test_what_is_read_ahead_keeps_nobody_from_leaving(prepared, monkeypatch):
    """Neither an iterator that is dropped during reads that take long, nor the next one."""
    simulated = simulated_store.Simulated(0.5, 4)
    monkeypatch.setattr(storage, "simulated", simulated)
    monkeypatch.setattr(pipeline, "READ_AT_ONCE_DISTANT", 8)
    source = sources.open_source(prepared[0], "train", prepared[1])
    host = pipeline.train_pipeline(train_config(16), source, np.arange(16), 10**6)
    for start in (0, 10**5):
        batches = host.batches(start)
        next(batches)
        batches.close()
    for ahead in list(read_ahead.RUNNING):
        for thread in ahead.threads:
            thread.join(20)
            assert not thread.is_alive()
    simulated.pool.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("prepared", ["array_record"], indirect=True)
def test_a_process_ends_while_it_reads(prepared):
    code = f"""
import sys
import numpy as np
from test_distant import batches_from
from vit_jax.data.sources import simulated_store
simulated_store.simulate(0.2, 4)
batches = batches_from({prepared[0]!r}, {prepared[1]!r})
next(batches)
sys.exit(75)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | dict(PYTHONPATH=f"{ROOT}:{ROOT}/tests:{ROOT}/tests/data"),
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 75


def test_a_damaged_record_is_skipped_alone(tmp_path, store):
    """Others that are read with it stay."""
    records = [bytes([i]) * 1000 for i in range(20)]
    part = write_records(tmp_path / "x", records, "group_size:1,uncompressed")
    whole = array_record.Records([part])
    content = bytearray((tmp_path / "x").read_bytes())
    content[whole.chunks.spans[7, 0] + 8] ^= 1  # the size of its data
    (tmp_path / "x").write_bytes(content)
    damaged = array_record.Records([part])
    with pytest.raises(array_record.Damaged):
        damaged.read(range(20))
    assert damaged.read([6, 8]) == [records[6], records[8]]

    pictures = memory_source(noise(20))
    everything = pictures.read

    def read(numbers):
        damaged.read(numbers)
        return everything(numbers)

    pictures.read = read
    host = pipeline.eval_pipeline(eval_config(), pictures, np.arange(20), 20, SIDE, "skip")
    assert [int(i) for batch in host.batches() for i in batch["id"][batch["mask"] == 0]] == [7]
    assert "instead of" in host.skipped[7] or "early" in host.skipped[7]


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_an_object_is_a_file(monkeypatch, size):
    monkeypatch.setattr(object_file, "BLOCK", 100)
    content = np.random.default_rng(0).bytes(size)
    asked = []

    def request(start, stop):
        asked.append((start, stop))
        return lambda: (content[start:stop], (0, 0))

    whole = object_file.ObjectFile(size, request)
    assert whole.read() == content and whole.read(5) == b""
    assert asked == [(start, min(start + 100, size)) for start in range(0, size, 100)]
    file = object_file.ObjectFile(size, request)
    local = io.BytesIO(content)
    rng = np.random.default_rng(1)
    for _ in range(100):
        position, length = rng.integers(0, size + 50, 2).tolist()
        assert file.seek(position) == local.seek(position) == file.tell()
        assert file.read(length) == local.read(length)
        assert file.tell() == local.tell()
    assert file.seek(-min(7, size), io.SEEK_END) == max(size - 7, 0)
    assert file.read(3) == content[max(size - 7, 0) :][:3]
