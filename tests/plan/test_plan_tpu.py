"""`vit_jax.plan` as users run it: tiny models compiled by the TPU compiler, without a pod."""

import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest
from conftest import ROOT

pytestmark = pytest.mark.plan

CONFIG = """
import ml_collections

def get_config(arg=""):
    config = ml_collections.ConfigDict()
    config.total_steps = 100
    config.image_size = 64
    config.prng = "rbg"
    config.model = dict(variant="Ti/16", width=256, num_heads=4, mlp_dim=1024, depth=2, pool="gap")
    config.model.dtype = "bfloat16"
    config.data = dict(name="imagenet2012", batch_size=64)
    config.optim = dict(lr=1e-3, warmup_steps=2, grad_clip_norm=1.0)
    return config
"""


@dataclasses.dataclass(frozen=True)
class Done:
    """One run of the command."""

    code: int
    plan: dict | None  # of --json
    out: str
    last: str  # line on stderr

    def sent(self, kind: str, axis: str = "") -> int:
        """Bytes per chip and step of one kind of collective along a mesh axis, or all."""
        found = [
            c
            for c in self.plan["collectives"]
            if c["kind"] == kind and axis in ("", *c["axis"].split("+"))
        ]
        return sum(c["bytes"] for c in found)

    @property
    def would_fit(self) -> list[list[str]]:
        """The arguments of every suggestion."""
        return [
            re.findall(r"--\S+", line)
            for line in self.out.splitlines()
            if line.startswith("would fit: ")
        ]


@functools.cache
def planned(*arguments: str) -> Done:
    """Runs the command in a process of its own; the same arguments are compiled once."""
    pytest.importorskip("libtpu")
    with tempfile.TemporaryDirectory() as folder:
        config, out = pathlib.Path(folder) / "tiny.py", pathlib.Path(folder) / "plan.json"
        config.write_text(CONFIG)
        options = [f"--config={config}", f"--json={out}", *arguments]
        command = [sys.executable, "-m", "vit_jax.plan", *options]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=500
        )
        plan = json.loads(out.read_text()) if out.exists() else None
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, plan, done.stdout, (done.stderr.strip().splitlines() or [""])[-1])


EIGHT = "--topology=v5e:2x4"
# Most of the memory in activations, so that there is something to save.
FULL = (EIGHT, "--config.data.batch_size=16384")


def test_data_parallelism_reduces_the_gradients_once_in_bfloat16():
    done = planned(EIGHT)
    plan = done.plan
    assert done.code == 0 and plan["fits"] and "fits" in done.out
    assert plan["num_chips"] == 8 and plan["mesh"] == dict(replica=1, data=8, fsdp=1, tensor=1)
    assert plan["sharding_constraints"] > 0
    assert plan["hbm_gib"]["params"] == pytest.approx(plan["params"] * 4 / 2**30)
    assert 1 <= done.sent("all-reduce", "data") / (2 * plan["params"]) < 2
    assert done.sent("all-gather") == done.sent("reduce-scatter") == 0
    assert 0 < plan["step_ms"]["low"] < plan["step_ms"]["high"]


def test_fsdp_splits_the_parameters_and_gathers_them():
    done = planned(EIGHT, "--config.mesh.fsdp=4")
    plan, plain = done.plan, planned(EIGHT).plan
    assert done.code == 0 and plan["sharding_constraints"] > 0
    # All but vectors, the head (whose 1,000 classes do not divide, but whose width does) and
    # positions are in quarters.
    assert plan["hbm_gib"]["params"] * 2**30 == pytest.approx(plan["params"] * 4 / 4, rel=0.03)
    assert plan["hbm_gib"]["opt_state"] == pytest.approx(
        plain["hbm_gib"]["opt_state"] / 4, rel=0.03
    )
    # Once forward and once backward, in bfloat16.
    assert 0.5 < done.sent("all-gather", "fsdp") / (2 * 2 * plan["params"]) < 2
    assert done.sent("reduce-scatter", "fsdp") > 0.5 * 2 * plan["params"]


def test_scanned_layers_gather_as_much_as_single_ones():
    done = planned(EIGHT, "--config.mesh.fsdp=4", "--config.model.scan=True")
    single = planned(EIGHT, "--config.mesh.fsdp=4")
    assert done.plan["hbm_gib"]["params"] == pytest.approx(single.plan["hbm_gib"]["params"])
    assert done.sent("all-gather", "fsdp") == pytest.approx(
        single.sent("all-gather", "fsdp"), rel=0.35
    )


def test_tensor_parallelism_sums_activations_over_its_axis():
    done = planned(EIGHT, "--config.mesh.tensor=2")
    # Twice a layer forward and twice backward: 16 images of 16 tokens of 256 channels, in bfloat16.
    assert 0.5 < done.sent("all-reduce", "tensor") / (2 * 4 * 16 * 16 * 256 * 2) < 2
    assert done.sent("all-reduce", "data") > 0


@pytest.mark.parametrize("axis", ["replica", "data"])
def test_between_slices_go_the_gradients_alone(axis):
    done = planned(EIGHT, "--num_slices=2", f"--config.mesh.{axis}=2", "--config.mesh.fsdp=8")
    plan = done.plan
    assert done.code == 0 and plan["num_chips"] == 16 and plan["num_slices"] == 2
    across = {c["kind"] for c in plan["collectives"] if axis in c["axis"].split("+")}
    assert across == {"all-reduce"}
    # Of the parameters each chip has an eighth (and all of the vectors); bfloat16, some in float32.
    assert 1 <= done.sent("all-reduce", axis) / (2 * plan["params"] / 8) < 2
    assert done.sent("all-gather", "fsdp") > 0


def test_slices_that_would_be_torn_apart_are_exit_code_2():
    done = planned(EIGHT, "--num_slices=2", "--config.mesh.fsdp=16")
    assert done.code == 2 and done.plan is None
    assert (
        done.last.startswith("error: ")
        and "make --config.mesh.replica a multiple of 2" in done.last
    )


def test_a_shape_that_does_not_exist_is_exit_code_2():
    done = planned("--topology=v5e:3x5")
    assert done.code == 2 and done.last.startswith("error: --topology=v5e:3x5 "), done.last


def test_what_does_not_fit_is_exit_code_1_and_its_suggestions_do_fit():
    whole = planned(*FULL)
    limit = f"--hbm_gib={whole.plan['hbm_gib']['total'] / 2:.4f}"
    done = planned(*FULL, limit)
    assert whole.code == 0 and done.code == 1
    assert done.last.startswith("error: ") and "does not fit on v5e:2x4" in done.last
    assert not done.plan["fits"] and done.plan["hbm_gib"] == whole.plan["hbm_gib"]
    assert len(done.would_fit) == len(done.plan["suggestions"]) > 0
    # The mildest and the last.
    for arguments in (done.would_fit[0], done.would_fit[-1]):
        other = planned(*FULL, limit, *arguments)
        assert other.code == 0 and other.plan["fits"], (arguments, other.plan["hbm_gib"])


def test_a_config_that_cannot_fit_is_exit_code_1():
    done = planned(EIGHT, "--hbm_gib=0.001")
    assert done.code == 1 and not done.would_fit
    assert "no setting of this config makes it fit into 0.00 GiB per chip" in done.last


def test_a_search_prints_the_best_with_lines_to_paste():
    done = planned(EIGHT, "--search", "--max_compiles=2")
    tried = done.plan["tried"]
    assert done.code == 0 and done.plan["fits"] and len(tried) == 2
    steps = [(one["step_ms"]["low"] + one["step_ms"]["high"]) / 2 for one in tried if one["fits"]]
    assert steps == sorted(steps)
    (best,) = [line for line in done.out.splitlines() if line.startswith("best: ")]
    arguments = best.removeprefix("best: ").split()
    assert arguments == done.plan["settings"].split() == tried[0]["settings"].split()
    again = planned(EIGHT, *arguments)
    assert again.plan["step_ms"] == pytest.approx(done.plan["step_ms"])


def test_the_cost_of_a_chip_does_not_grow_with_the_pod():
    small = planned(EIGHT)
    done = planned("--topology=v5e:16x16", f"--config.data.batch_size={8 * 256}")
    estimate = [plan["step_ms"]["compute_estimate"] for plan in (done.plan, small.plan)]
    assert estimate[0] == pytest.approx(estimate[1], rel=0.02)
    assert 0.5 < done.sent("all-reduce") / small.sent("all-reduce") < 2
    assert done.plan["hbm_gib"]["total"] == pytest.approx(small.plan["hbm_gib"]["total"], rel=0.05)


@pytest.mark.parametrize("topology", ["v4:2x2x2", "v6e:2x4"])
def test_every_chip_has_one_device_and_its_own_memory(topology):
    done = planned(f"--topology={topology}")
    assert done.code == 0 and done.plan["num_chips"] == 8
    limit = {"v4": 30.75, "v6e": 31.24}[topology.split(":")[0]]
    assert done.plan["hbm_limit_gib"] == limit and done.plan["step_ms"]["compute_estimate"] > 0


def test_the_widest_heads_compile_for_the_chip_with_the_least_memory_for_kernels():
    """Those of G/14: with 256 tokens the kernel would need 16.5 MiB, and v4 has 16."""
    shape = ["model.variant=Ti/14", "model.width=1664", "model.num_heads=16", "model.depth=1"]
    shape += ["image_size=224", "data.batch_size=16"]
    done = planned("--topology=v4:2x2x1", *(f"--config.{text}" for text in shape))
    assert done.code == 0 and done.plan["fits"]
