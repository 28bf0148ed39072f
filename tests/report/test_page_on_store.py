"""The page of a run on a store, through the store's real client."""

import os
import subprocess
import sys

import pytest
import workdirs
from conftest import ROOT
from store.process import RunningStore

from vit_jax import config as configs

pytestmark = pytest.mark.slow

# One process, which takes seconds to start.
CODE = """
import sys
from vit_jax.cli import objects
from vit_jax.report import __main__ as report

local = sys.argv[1]
codes = [report.main(["gs://bucket/run", f"--out={local}"])]
assert "tensorflow" not in sys.modules
assert objects.names("gs://bucket/run/figures/") == ["a.txt", "b"]
codes += [report.main(["gs://bucket/empty"]), report.main(["gs://bucket/run"])]
print(*codes)
"""


def test_a_run_on_a_store(tiny, tmp_path):
    folder = tmp_path / "run"
    workdirs.make_run(folder, configs.load(tiny, []))
    workdirs.make_evaluation(folder / "evals/test")
    (folder / "checkpoints/100/state").write_text("")
    out = tmp_path / "out.html"
    with RunningStore(tmp_path) as store:
        for path in folder.rglob("*"):
            if path.is_file():
                store.write(f"bucket/{path.relative_to(tmp_path)}", path.read_bytes())
        # The first one stands for the folder, as Google's console makes it.
        for name in ("", "b/c.txt", "a.txt", "b/d.txt"):
            store.write(f"bucket/run/figures/{name}", b"")
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(out)],
            env=os.environ | store.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.splitlines()[-1:] == ["0 2 0"], done.stdout + done.stderr
        assert "gs://bucket/empty has no run" in done.stderr
        written = store.read("bucket/run/report.html").decode()
    text = out.read_text()
    assert "gs://bucket/run" in text and "done, step 100 of 100" in text
    assert "step 100</td>" in text  # the checkpoint
    assert "expected calibration error" in text and text.count('<img src="data:') == 2
    assert written.count("<tr>") == text.count("<tr>")
