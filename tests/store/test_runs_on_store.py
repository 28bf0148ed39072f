"""Whole commands whose folders are on a store, with its real clients."""

import collections
import json
import os
import signal
import subprocess
import sys
import time

import mocked_tfds
import pytest
from conftest import ROOT, metric_lines
from PIL import Image
from store.process import RunningStore
from test_vtab import SMALL

from vit_jax.train import __main__ as train

pytestmark = pytest.mark.slow

STEPS = 30
KEYS = ("step", "train/loss", "train/grad_norm", "eval/val/top1")


def begin(store, *command: str) -> subprocess.Popen:
    environment = os.environ | store.environment
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen([sys.executable, *command], env=environment, cwd=ROOT, **pipes)


def wait_for_checkpoint(store, job: subprocess.Popen, step: int) -> None:
    """Until the run on the store has saved this step or a later one."""
    while job.poll() is None:
        names = store.names("run/checkpoints/")
        saved = [name.split("/")[2] for name in names if name.endswith("commit_success.txt")]
        if any(name.isdigit() and int(name) >= step for name in saved):
            return
        time.sleep(0.05)
    raise AssertionError(job.communicate()[0])


def what_was_asked(requests: list[dict]) -> collections.Counter:
    """How often the objects and folders of the run were requested, but for its checkpoints."""
    asked = [request["query"].get("prefix") or request["what"] for request in requests]
    return collections.Counter(
        what for what in asked if "run" in what and "checkpoints" not in what
    )


def test_a_run_on_a_store_is_that_of_a_local_folder(tiny, tmp_path):
    with RunningStore(tmp_path) as store:
        check_run(tiny, tmp_path, store)
        check_commands(tiny, tmp_path, store)


def check_run(tiny, tmp_path, store):
    """Stopped by SIGTERM, killed while one in 20 requests fails, and continued."""
    more = [f"--config.total_steps={STEPS}", "--config.evals.val.every=15"]
    assert train.main([f"--config={tiny}", f"--workdir={tmp_path}/run", *more]) == 0
    straight = metric_lines(tmp_path / "run")
    command = ["-m", "vit_jax.train", f"--config={tiny}", "--workdir=gs://bucket/run", *more]

    job = begin(store, *command)
    wait_for_checkpoint(store, job, 8)
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate()
    assert job.returncode == 75, out

    store.set_faults("503:0.05")
    job = begin(store, *command)
    wait_for_checkpoint(store, job, 20)
    job.kill()
    job.communicate()

    job = begin(store, *command)
    out, _ = job.communicate()
    assert job.returncode == 0, out
    assert "Traceback" not in out
    assert store.injected()["503"] > 0
    store.set_faults()

    lines = [json.loads(line) for line in store.read("bucket/run/metrics.jsonl").splitlines()]
    for key in KEYS:
        assert [line.get(key) for line in lines] == [line.get(key) for line in straight], key
    log = store.read("bucket/run/log.txt").decode()
    assert log.count("training from step") >= 2  # the last lines before a kill may be lost
    # Nothing is requested step by step: in each of the three starts only now and then.
    asked = what_was_asked(store.requests())
    assert asked["run/log.txt"] > 0
    assert max(asked.values()) <= 3 * 12, asked.most_common(5)


# Several commands in one process, which takes ten seconds to start.
COMMANDS = """
import sys
from vit_jax import convert, predict
from vit_jax.evaluate import __main__ as evaluate
from vit_jax.train import __main__ as train
from etils import epath

tiny, image = sys.argv[1:]
epath.Path(image).copy("gs://bucket/images/deep/image.png")
init = "--config.init_from=gs://bucket/run"
print(
    train.main([f"--config={tiny}", "--workdir=gs://none/run"]),
    train.main([f"--config={tiny}", "--workdir=gs://No_Bucket/run"]),
    evaluate.main(["--config=configs/evaluate.py:digits", init, "--json=gs://none/eval.json"]),
    evaluate.main(["--config=configs/evaluate.py:digits", init, "--json=gs://bucket/new/eval.json",
                   "--out=gs://bucket/evals"]),
    convert.main(["gs://bucket/run", "gs://bucket/converted/run.npz"]),
    convert.main(["gs://bucket/converted/run.npz", "gs://bucket/timm", "--format=timm"]),
    convert.main(["gs://bucket/timm", "gs://bucket/big.npz", "--format=big_vision"]),
    convert.main(["gs://bucket/big.npz", "gs://bucket/again"]),
    predict.main(["--checkpoint=gs://bucket/again", "gs://bucket/images", "--out=gs://bucket/p.npz"]),
    file=sys.stderr,
)
"""


def check_commands(tiny, tmp_path, store):
    """They read what the run wrote, write to folders that do not exist, and say what is wrong."""
    path = tmp_path / "image.png"
    Image.new("RGB", (8, 8), "red").save(path)
    job = begin(store, "-c", COMMANDS, tiny, str(path))
    out, _ = job.communicate()
    assert out.splitlines()[-1] == "2 2 2 0 0 0 0 0 0", out
    errors = [line for line in out.splitlines() if line.startswith("error: ")]
    assert "gs://none/run can't be reached (there is no such bucket)" in errors[0]
    assert "Invalid GCS bucket name" in errors[1]
    assert "--json=gs://none/eval.json can't be reached" in errors[2]
    top1 = json.loads(store.read("bucket/new/eval.json"))["eval/test/top1"]
    assert top1 == json.loads(store.read("bucket/evals/test/summary.json"))["top1"] > 0
    assert store.read("bucket/evals/test/least_sure.jpg").startswith(b"\xff\xd8")
    assert store.read("bucket/p.npz").startswith(b"PK")


# FILE.py FILE.py ROOT DATA: two commands of several runs.
SUITES = """
import sys
from vit_jax import finetune
from vit_jax.vtab import __main__ as vtab

tiny, small, root, data = sys.argv[1:]
short = ["--config.total_steps=4", "--lrs=0.01,0.001", "--held_out=20%"]
sys.exit(
    finetune.main([f"--config={tiny}", f"--workdir={root}/tuned", *short])
    or vtab.main(
        ["run", f"--config={small}", f"--workdir={root}/vtab", "--tasks=dtd"]
        + [f"--config.data.data_dir={data}"]
    )
)
"""


def test_fine_tuning_and_vtab_on_a_store_give_what_they_give_locally(tiny, tmp_path):
    small = tmp_path / "small.py"
    small.write_text(SMALL.format(root=str(ROOT)))
    data = tmp_path / "data"
    mocked_tfds.write("dtd:3.0.1", str(data), mocked_tfds.COUNTS["dtd:3.0.1"])
    with RunningStore(tmp_path) as store:
        for path in (path for path in data.rglob("*") if path.is_file()):
            store.write(f"bucket/data/{path.relative_to(data)}", path.read_bytes())
        store.set_faults("503:0.05")
        jobs = [
            begin(store, "-c", SUITES, tiny, str(small), *folders)
            for folders in (("gs://bucket", "gs://bucket/data"), (str(tmp_path), str(data)))
        ]
        for job in jobs:
            out, _ = job.communicate()
            assert job.returncode == 0, out
        assert store.injected()["503"] > 0
        found = json.loads(store.read("bucket/tuned/finetune.json"))
        task = json.loads(store.read("bucket/vtab/vtab.json"))["tasks"]["dtd"]
        assert store.read("bucket/vtab/vtab.png").startswith(b"\x89PNG")
        assert json.loads(store.read("bucket/tuned/final/evals/val/summary.json"))["count"] == 360
    assert found == json.loads((tmp_path / "tuned/finetune.json").read_text())
    local = json.loads((tmp_path / "vtab/vtab.json").read_text())["tasks"]["dtd"]
    for key in ("seeds", "num_test", "lr", "ci95"):
        assert task[key] == local[key]
    assert task["data"]["ids"] == local["data"]["ids"]
