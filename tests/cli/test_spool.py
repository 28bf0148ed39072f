"""Growing files of a workdir on a store; the store is TensorStore's, in memory."""

import threading
import time

import pytest
import tensorstore as ts
from etils import epath

from vit_jax.cli import objects, spool
from vit_jax.errors import UserError


class Bucket:
    """A bucket in memory that counts writes and can fail."""

    def __init__(self):
        self.inner = ts.KvStore.open("memory://").result()
        self.writes = []
        self.problem = None

    def read(self, key, byte_range):
        if self.problem:
            raise ValueError(self.problem)
        return self.inner.read(key, byte_range=byte_range)

    def write(self, key, value):
        self.writes.append(key)
        if self.problem:
            raise ValueError(self.problem)
        return self.inner.write(key, value)

    def content(self, key: str) -> bytes:
        return self.inner.read(key).result().value


@pytest.fixture
def bucket(monkeypatch):
    found = Bucket()
    monkeypatch.setattr(
        objects, "locate", lambda path, retries=0: (found, path.removeprefix("gs://bucket/"))
    )
    return found


def opened(every_s: float = 3600.0) -> spool.Files:
    return spool.open_files(epath.Path("gs://bucket/run"), every_s)


def append(path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_local_workdir_needs_no_spool(tmp_path):
    files = spool.open_files(epath.Path(tmp_path))
    append(files.path("logs/process_1.txt"), "hello\n")
    files.deliver()
    files.close()
    assert (tmp_path / "logs/process_1.txt").read_text() == "hello\n"


def test_what_grows_is_continued_and_sent_when_it_has_changed(bucket):
    bucket.inner.write("run/log.txt", b"one\n").result()
    files = opened()
    append(files.path("log.txt"), "two\n")
    append(files.path("logs/process_1.txt"), "three\n")
    append(files.path("half.json.tmp"), "{")
    assert bucket.writes == []
    files.deliver()
    assert bucket.content("run/log.txt") == b"one\ntwo\n"
    assert bucket.content("run/logs/process_1.txt") == b"three\n"
    assert sorted(bucket.writes) == ["run/log.txt", "run/logs/process_1.txt"]
    files.deliver()
    assert len(bucket.writes) == 2, "nothing has changed"
    append(files.path("log.txt"), "four\n")
    files.close()
    assert bucket.content("run/log.txt") == b"one\ntwo\nfour\n"
    assert len(bucket.writes) == 3 and not files.folder.exists()


def test_it_is_sent_by_itself_after_a_time(bucket):
    files = opened(every_s=0.01)
    append(files.path("log.txt"), "one\n")
    while not bucket.writes:
        time.sleep(0.01)
    files.close()
    assert bucket.content("run/log.txt") == b"one\n"


def test_a_store_that_fails_delays_what_is_sent(bucket):
    files = opened()
    append(files.path("metrics.jsonl"), "1\n")
    bucket.problem = "503"
    files.deliver()
    files.deliver()
    bucket.problem = None
    append(files.path("metrics.jsonl"), "2\n")
    files.deliver()
    assert bucket.content("run/metrics.jsonl") == b"1\n2\n"
    files.close()


def test_what_can_not_be_sent_at_the_end_is_kept_and_named(bucket, monkeypatch):
    said = []
    monkeypatch.setattr(spool.log, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(spool, "LAST_TRIES", 2)
    files = opened()
    append(files.path("metrics.jsonl"), "1\n")
    bucket.problem = "403"
    files.close()
    assert said[0].startswith("gs://bucket/run/metrics.jsonl can't be written (403): it is kept in")
    assert said[-1] == f"gs://bucket/run can't be written: metrics.jsonl kept in {files.folder}"
    assert (files.folder / "metrics.jsonl").read_text() == "1\n"
    with pytest.raises(UserError, match=r"gs://bucket/run/log.txt can't be read \(403\)"):
        files.path("log.txt")


def test_lines_that_are_written_while_others_are_sent_are_not_lost(bucket):
    """A writer appends all the time; at the end every line has arrived."""
    files = opened(every_s=0.001)
    path = files.path("log.txt")

    def write():
        for number in range(300):
            append(path, f"{number}\n")

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        files.deliver()
    files.close()
    assert bucket.content("run/log.txt").split() == [str(i).encode() for i in range(300)]


def test_a_damaged_answer_is_not_written_back(monkeypatch):
    """Two answers must agree: here one of them has a flipped bit, then all differ."""
    answers = [b'{"loss": 1.5}\n', b'{"loss": 1.4}\n', b'{"loss": 1.5}\n', b'{"loss": 1.5}\n']
    monkeypatch.setattr(objects, "content", lambda path: answers.pop(0))
    files = opened()
    assert files.path("metrics.jsonl").read_bytes() == b'{"loss": 1.5}\n'
    numbers = iter(range(100))
    monkeypatch.setattr(objects, "content", lambda path: str(next(numbers)).encode())
    with pytest.raises(
        UserError, match=r"run/log\.txt can't be read \(its content differs each time\): fix it"
    ):
        files.path("log.txt")
    files.close()
