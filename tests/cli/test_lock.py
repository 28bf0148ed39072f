"""Who holds a workdir: of two processes, hosts and stores, alive and dead."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT
from etils import epath
from store.process import RunningStore

from vit_jax.cli import lock
from vit_jax.errors import UserError

HOLD = """
import sys, time
from etils import epath
from vit_jax.cli import lock
lock.RENEW_S = 0.1
with lock.held(epath.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def holder(workdir, **variables):
    """A process that holds the workdir until it is killed."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    command = [sys.executable, "-c", HOLD, str(workdir)]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, **pipes) as job:
        assert job.stdout.readline() == "held\n", job.communicate()
        yield job
        job.kill()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "EXPIRES_S", 1.0)
    monkeypatch.setattr(lock, "POLL_S", 0.05)


def content(workdir) -> dict:
    return json.loads((workdir / "lock.json").read_text())


def test_a_second_process_is_refused_while_the_first_lives(tmp_path):
    workdir = epath.Path(tmp_path)
    with (
        holder(workdir) as job,
        pytest.raises(UserError, match=rf"is in use by process {job.pid} on .*--take_over"),
    ):
        lock.Lock(workdir).acquire(take_over=False)
    assert content(workdir)["pid"] == job.pid
    start = time.monotonic()
    with lock.held(workdir):
        assert content(workdir)["pid"] == os.getpid()
        assert time.monotonic() - start < 5, "a process of this machine is known to be dead"
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
            lock.Lock(workdir).acquire(take_over=False)
    assert not list(tmp_path.iterdir())


def test_who_is_taken_over_ends_without_a_word_to_the_workdir(tmp_path):
    workdir = epath.Path(tmp_path)
    with holder(workdir) as job, lock.held(workdir, take_over=True):
        assert job.wait(timeout=30) == 2
        last = job.stderr.read().splitlines()[-1]
        assert last.startswith(f"error: --workdir={tmp_path} is no longer that of this run: it was")
        assert f"taken over by process {os.getpid()} on " in last
        assert content(workdir)["pid"] == os.getpid()


def test_whose_workdir_is_moved_away_ends_and_makes_no_new_one(tmp_path):
    workdir = epath.Path(tmp_path / "run")
    workdir.mkdir()
    with holder(workdir) as job:
        (tmp_path / "run").rename(tmp_path / "away")
        assert job.wait(timeout=30) == 2
        assert "lock.json is gone: the folder was moved or deleted" in job.stderr.read()
    assert [path.name for path in tmp_path.iterdir()] == ["away"]


def test_a_renewal_that_a_store_does_twice_is_no_loss(tmp_path):
    """It repeats a write whose answer was lost, and then says that the condition does not hold."""
    one = lock.Lock(epath.Path(tmp_path))
    one.acquire(take_over=False)
    before = one.generation
    assert one.write(before)
    one.generation = before
    assert not one.write(one.generation)
    assert one.loss() is None and one.write(one.generation)
    one.release()


def elsewhere(workdir, **more) -> dict:
    """Facts of a holder on another host."""
    facts = dict(host="elsewhere", pid=7, born="5", machine="another", renewed="noon") | more
    (workdir / "lock.json").write_text(json.dumps(facts))
    return facts


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"host": "x"}', '{"host": 1, "pid": 2, "born": 3}']
)
def test_what_can_not_be_read_expires(text, tmp_path, quick):
    (tmp_path / "lock.json").write_text(text)
    with lock.held(epath.Path(tmp_path)):
        assert content(tmp_path)["pid"] == os.getpid()


def test_a_holder_on_another_host_lives_as_long_as_it_renews(tmp_path, quick, caplog):
    facts = elsewhere(tmp_path)
    over = threading.Event()

    def renew():
        number = 0
        while not over.wait(0.2):
            number += 1
            (tmp_path / "fresh").write_text(json.dumps(facts | dict(renewed=str(number))))
            (tmp_path / "fresh").rename(tmp_path / "lock.json")

    thread = threading.Thread(target=renew)
    thread.start()
    with pytest.raises(UserError, match="in use by process 7 on elsewhere, seen at"):
        lock.Lock(epath.Path(tmp_path)).acquire(take_over=False)
    over.set()
    thread.join()
    start = time.monotonic()
    with lock.held(epath.Path(tmp_path)):
        assert time.monotonic() - start >= 1.0
    assert "is locked by process 7 on elsewhere" in caplog.text


def test_of_many_that_find_it_expired_one_takes_it(tmp_path, quick):
    elsewhere(tmp_path)
    locks = [lock.Lock(epath.Path(tmp_path)) for _ in range(8)]
    results = []

    def acquire(one):
        try:
            one.acquire(take_over=False)
            results.append(one)
        except UserError:
            results.append(None)

    threads = [threading.Thread(target=acquire, args=(one,)) for one in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [one for one in results if one]
    assert len(results) == 8
    winner.release()


@pytest.mark.slow
def test_on_a_store_it_costs_a_request_for_each_renewal(tmp_path):
    with (
        RunningStore(tmp_path) as store,
        holder("gs://bucket/run", **store.environment) as job,
    ):
        second = subprocess.run(
            [sys.executable, "-c", HOLD, "gs://bucket/run"],
            cwd=ROOT, env=os.environ | store.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert f"in use by process {job.pid}" in second.stderr
        before = len(store.requests())
        time.sleep(3)
        assert 5 <= len(store.requests()) - before <= 31
        job.kill()
        job.wait()
        with holder("gs://bucket/run", **store.environment):
            pass
