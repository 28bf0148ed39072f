"""The account of a run's wall time, on clocks that the tests turn, and the command that shows it."""

import json
import random
import subprocess
import sys
import time
import types

import pytest
from conftest import ROOT, last_error
from etils import epath

from vit_jax import goodput as command
from vit_jax.train import console, goodput
from vit_jax.train.goodput import Account, Stopwatch


class Clock:
    """The host's clock, and one that is never set; both move only when a test says so."""

    def __init__(self):
        self.host = 1.7e9
        self.steady = 50.0

    def pass_(self, seconds: float) -> None:
        self.host += seconds
        self.steady += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    fake = types.SimpleNamespace(time=lambda: clock.host, monotonic=lambda: clock.steady)
    monkeypatch.setattr(goodput, "time", fake)
    return clock


@pytest.fixture
def path(tmp_path):
    return epath.Path(tmp_path / "goodput.json")


def start(path, age: float = 0.0, requested_at: str = "") -> Account:
    return Account(path, Stopwatch(age, requested_at)).__enter__()


def kill(account: Account) -> None:
    """What SIGKILL leaves: the file as it was written last."""
    account.over.set()
    account.thread.join()


def step(account: Account, clock: Clock, number: int, data_s: float, step_s: float) -> None:
    with account.spending("data_wait"):
        clock.pass_(data_s)
    clock.pass_(step_s)
    account.did_step(number)


def totals(path) -> dict:
    return goodput.totals(goodput.parse(path.read_text()))


def test_every_second_of_two_starts_has_its_part(clock, path):
    account = start(path, age=7.0)
    with account.spending("waiting"):
        clock.pass_(2.0)
    with account.spending("compilation"):
        clock.pass_(30.0)
    with account.steps(0):
        for number in range(1, 11):
            step(account, clock, number, 0.25, 1.0)
            if number == 6:
                with account.spending("saves"):
                    clock.pass_(4.0)
        account.write()
        step(account, clock, 11, 0.25, 1.0)  # nothing says that it was done
    kill(account)
    clock.pass_(100.0)
    account = start(path, age=5.0)  # of these 100
    with account.steps(6):
        for number in range(7, 13):
            step(account, clock, number, 0.25, 1.0)
            with account.spending("evaluation"):
                clock.pass_(8.0)
    clock.pass_(0.5)
    account.__exit__()
    assert totals(path) == dict(
        wall_s=7 + 2 + 30 + 11 * 1.25 + 4 + 100 + 6 * 9.25 + 0.5,
        parts=dict(
            waiting=2.0,
            startup=7.0 + 5.0,
            compilation=30.0,
            data_wait=10 * 0.25 + 6 * 0.25,
            steps=10.0 + 2.0,  # to 10, then 11 and 12
            repeated_steps=4.0,  # 7 to 10
            evaluation=6 * 8.0,
            saves=4.0 + 0.5,  # at the end files are closed
            down=1.25 + 95.0,
        ),
        starts=2,
        steps_repeated=4,
        goodput=pytest.approx(12 / 212.75),
    )
    saved = json.loads(path.read_text())
    assert {name: saved[name] for name in totals(path)} == totals(path)
    steps = [(record["first_step"], record["last_step"]) for record in saved["records"]]
    assert steps == [(0, 10), (6, 12)]


@pytest.mark.parametrize("seed", range(5))
def test_the_parts_add_up_to_the_wall_time_whatever_happens(seed, clock, path):
    rng = random.Random(seed)
    begun = clock.host
    for _ in range(20):
        account = start(path)
        with account.steps(rng.randrange(30)):
            for _ in range(rng.randrange(40)):
                with account.spending(rng.choice(goodput.OF_A_START)):
                    clock.pass_(rng.expovariate(1))
                    account.did_step(rng.randrange(40))
                clock.pass_(rng.expovariate(1))
                if rng.random() < 0.2:
                    account.write()
        if rng.random() < 0.5:
            kill(account)
        else:
            account.__exit__()
        ended = clock.host
        clock.pass_(rng.expovariate(0.1))
    account.write()  # the last start may have been killed
    found = totals(path)
    assert sum(found["parts"].values()) == pytest.approx(found["wall_s"], abs=1e-6)
    assert min(found["parts"].values()) >= 0 and found["starts"] == 20
    assert ended - begun <= found["wall_s"] + 0.1  # each part of a start is rounded to 1 ms
    assert found["wall_s"] <= clock.host - begun + 0.1


def test_steps_count_as_repeated_up_to_the_last_one_of_all_starts(clock, path):
    for first, last in ((0, 20), (5, 8), (5, 30)):  # the second is killed before it was at 20 again
        account = start(path)
        with account.steps(first):
            for number in range(first + 1, last + 1):
                step(account, clock, number, 0.0, 1.0)
        account.__exit__()
    found = totals(path)
    assert (found["parts"]["steps"], found["parts"]["repeated_steps"]) == (20 + 10, 3 + 15)
    assert found["steps_repeated"] == 18


def test_steps_after_going_back_count_as_repeated(clock, path):
    """A start at 10 goes from 15 back to 5, and is killed at 8; the next one begins at 5."""
    account = start(path)
    with account.steps(10):
        for number in range(11, 16):
            step(account, clock, number, 0.0, 1.0)
        account.stand_at(5)
        for number in range(6, 9):
            step(account, clock, number, 0.0, 1.0)
    account.__exit__()
    account = start(path)
    with account.steps(5):
        for number in range(6, 18):
            step(account, clock, number, 0.0, 1.0)
    account.__exit__()
    assert totals(path)["steps_repeated"] == 3 + 10


def test_a_clock_that_was_set_back_gives_no_negative_time(clock, path):
    for _ in range(2):
        account = start(path, age=1.0)
        with account.steps(0):
            clock.host -= 1000.0
            clock.pass_(5.0)
            account.write()
            clock.steady -= 2.0  # a steady clock must not do this, but virtual machines have
            with account.spending("data_wait"):
                clock.pass_(1.0)
        account.__exit__()
    found = totals(path)
    assert (found["parts"]["down"], found["parts"]["data_wait"]) == (0.0, 2.0)
    assert found["parts"]["steps"] == 10.0
    assert min(found["parts"].values()) == 0.0
    assert found["wall_s"] == pytest.approx(sum(found["parts"].values()))


def test_the_queue_counts_as_waiting_but_not_the_time_of_earlier_starts(clock, path):
    queued = str(clock.host)
    clock.pass_(600.0)
    account = start(path, age=10.0, requested_at=queued)
    clock.pass_(5.0)
    account.__exit__()
    clock.pass_(60.0)
    account = start(path, age=10.0, requested_at=queued)  # not the time of the second request
    account.__exit__()
    found = totals(path)
    assert found["parts"]["waiting"] == 590.0 + 50.0
    assert (found["parts"]["startup"], found["parts"]["down"]) == (25.0, 0.0)
    assert found["wall_s"] == clock.host - float(queued)


def test_only_the_first_run_of_a_process_counts_the_queue_and_the_imports(clock, tmp_path):
    stopwatch = Stopwatch(10.0, str(clock.host - 100.0))
    for name in ("first", "second"):
        with Account(epath.Path(tmp_path / name), stopwatch):
            clock.pass_(1.0)
        clock.pass_(3.0)
    first, second = (totals(epath.Path(tmp_path / name))["parts"] for name in ("first", "second"))
    assert (first["waiting"], first["startup"]) == (90.0, 11.0)
    assert (second["waiting"], second["startup"]) == (0.0, 4.0)


@pytest.mark.parametrize("text", ["soon", "nan", "9e9"])
def test_a_wrong_time_of_the_request_is_not_counted(text, clock, path, caplog):
    start(path, requested_at=text).__exit__()
    assert totals(path)["wall_s"] == 0.0
    assert (f"VIT_JAX_REQUESTED_AT={text} in the environment is not" in caplog.text) == (
        text != "9e9"
    )


RECORD = dict(
    begun=1.0,
    first_step=0,
    last_step=0,
    steps_repeated=0,
    parts=dict.fromkeys(goodput.OF_A_START, 1.0),
)
DAMAGED = [
    b"",
    b'{"records": [{"begun"',
    b"[]",
    b"null",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"records": 3}',
    b'{"records": {"a": 1}}',
    b'{"records": [{}]}',
    *(
        json.dumps(dict(records=[RECORD | change])).encode()
        for change in (
            dict(begun="now"),
            dict(begun=float("nan")),
            dict(last_step=-1),
            dict(last_step=10**400),
            dict(parts={}),
            dict(parts=RECORD["parts"] | dict(steps=None)),
        )
    ),
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda damaged: str(damaged[:60]))
def test_a_damaged_file_is_set_aside_and_refused_by_the_command(
    damaged, clock, path, caplog, capsys
):
    path.write_bytes(damaged)
    assert command.main([str(path.parent)]) == 2
    assert f"{path} can't be read" in last_error(capsys)
    (path.parent / "damaged_goodput.json").write_text("an older one")
    start(path).__exit__()
    assert (path.parent / "damaged_goodput_2.json").read_bytes() == damaged
    assert (path.parent / "damaged_goodput.json").read_text() == "an older one"
    assert totals(path)["starts"] == 1
    assert "is damaged" in caplog.text and "now called damaged_goodput_2.json" in caplog.text


def test_a_file_that_can_not_be_read_is_left_alone_and_stops_no_run(clock, path, caplog):
    path.mkdir()
    account = start(path)
    with account.steps(0):
        step(account, clock, 1, 0.0, 1.0)
    account.__exit__()
    assert path.is_dir() and not list(path.iterdir()) and account.totals() == {}
    assert "can't be read" in caplog.text


def test_a_file_that_can_not_be_written_is_written_later(clock, path, caplog, monkeypatch):
    account = start(path)
    before = path.read_text()

    def full(*_):
        raise OSError(28, "full", "goodput.json")

    with monkeypatch.context() as patch:
        patch.setattr(goodput.cli, "replace_file", full)
        clock.pass_(5.0)
        account.write()
        account.write()
    assert caplog.text.count("no space is left on the device") == 1 and path.read_text() == before
    account.__exit__()
    assert totals(path)["wall_s"] == 5.0


def test_a_run_that_says_nothing_for_long_is_refreshed(clock, path, monkeypatch):
    monkeypatch.setattr(goodput, "REFRESH_S", 0.01)
    with Account(path, Stopwatch()) as account, account.spending("compilation"):
        clock.pass_(70.0)
        deadline = time.monotonic() + 60
        while totals(path)["parts"]["compilation"] < 70.0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_another_process_than_the_first_writes_nothing(clock, tmp_path):
    with Account(None, Stopwatch()) as account, account.steps(0):
        step(account, clock, 1, 1.0, 1.0)
        account.write()
    assert account.totals() == {} and not list(tmp_path.iterdir())


def test_a_process_is_as_old_as_the_system_says():
    """Older than what it runs first, and not older than the request to start it."""
    code = """
import time
first = time.time()
from vit_jax.train import goodput
print(first, time.time() - goodput.process_age())
"""
    before = time.time()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    first, begun = map(float, done.stdout.split())
    assert before - 0.02 < begun < first  # the system counts in units of 10 ms


# --- what is shown ---


def write_run(folder, steps: float, down: float = 0.0) -> epath.Path:
    """A run of two starts with `steps` seconds of steps each, `down` seconds between them."""
    parts = dict.fromkeys(goodput.OF_A_START, 0.0) | dict(steps=steps, startup=10.0)
    records = [
        RECORD | dict(begun=1000.0, parts=parts),
        RECORD | dict(begun=1010.0 + steps + down, parts=parts, steps_repeated=3),
    ]
    folder.mkdir()
    path = epath.Path(folder / "goodput.json")
    path.write_text(json.dumps(dict(records=records)))
    return path


def test_the_summary_has_the_parts_of_all_starts(tmp_path):
    account = totals(write_run(tmp_path / "run", steps=3600.0, down=180.0))
    assert console.goodput_rows(account) == [
        ("goodput", "97.3% of 2:03:20 in 2 starts, 3 steps done again"),
        ("  start-up", "0:20, 0.3%"),
        ("  steps", "2:00:00, 97.3%"),
        ("  down between starts", "3:00, 2.4%"),
    ]
    assert console.goodput_rows({}) == []


def test_the_command_shows_one_run_or_many(tmp_path, capsys):
    write_run(tmp_path / "one", steps=40.0)
    write_run(tmp_path / "two", steps=20.0, down=40.0)
    out = tmp_path / "out.json"
    assert command.main([f"{tmp_path}/one", f"--json={out}"]) == 0
    one = json.loads(out.read_text())
    assert one == totals(epath.Path(tmp_path / "one/goodput.json"))
    assert (one["wall_s"], one["goodput"], one["starts"], one["steps_repeated"]) == (100, 0.8, 2, 3)
    text = capsys.readouterr().out
    assert "80.0%" in text and "start-up" in text and "steps done again: 3" in text
    assert command.main([f"{tmp_path}/one", f"{tmp_path}/two", f"--json={out}"]) == 0
    found = json.loads(out.read_text())
    assert [run.pop("workdir") for run in found["runs"]] == [f"{tmp_path}/one", f"{tmp_path}/two"]
    assert found["runs"][0] == one
    total = found["total"]
    assert total["parts"].keys() == one["parts"].keys()
    assert (total["wall_s"], total["starts"], total["parts"]["down"]) == (200, 4, 40)
    assert (total["goodput"], total["steps_repeated"]) == (0.6, 6)
    text = capsys.readouterr().out
    assert "all runs" in text and "60.0%" in text and "40.0%" in text


def test_a_folder_without_an_account_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    for folder in ("nowhere", "file"):
        assert command.main([f"{tmp_path}/{folder}"]) == 2
        assert f"{tmp_path}/{folder}/goodput.json does not exist: give" in last_error(capsys)


def test_a_run_on_a_store_is_read_without_tensorflow_and_devices(tmp_path):
    text = write_run(tmp_path / "run", steps=40.0).read_text()
    code = """
import sys
import tensorstore
from vit_jax import goodput
from vit_jax.cli import objects

store = tensorstore.KvStore.open("memory://").result()
store.write("runs/l16/goodput.json", sys.argv[1]).result()
objects.bucket = lambda root, retries: store
assert goodput.main(["gs://bucket/runs/l16"]) == 0
assert goodput.main(["gs://bucket/runs/l17"]) == 2
assert not {"jax", "tensorflow", "orbax"} & sys.modules.keys()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, text], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "80.0%" in done.stdout, done.stderr
    assert "error: gs://bucket/runs/l17/goodput.json does not exist: give" in done.stderr
