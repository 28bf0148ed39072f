"""Analytic FLOPs against XLA's count, and the timer."""

import types

import jax
import jax.numpy as jnp
import pytest

import vit_jax
from vit_jax.distributed import hardware
from vit_jax.train import timer as timers
from vit_jax.train.timer import ProfilerWindow, StepTimer, hbm_gib
from vit_jax.weights import adapt


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("B/16", {}),
        (
            "B/16",
            dict(pool="gap", image_size=384, pre_logits=True, attention="einsum"),
        ),  # XLA counts a loop once
        ("S/32", dict(pool="map", image_size=(192, 256))),
        ("R50+B/16", {}),
        ("R26+S/32", dict(image_size=(200, 264))),
        ("R+Ti/16", {}),
        ("S/16", dict(posemb="relative")),  # without the products by distance it would be 4 % off
        (
            "S/32",
            dict(image_size=96, registers=16),
        ),  # 9 patch tokens: the registers are most of the work
        ("S/32", dict(image_size=96, pool="map", registers=16, class_token=True)),
        (
            "Ti/16",
            dict(image_size=32, depth=1, num_classes=5000, distilled=True),
        ),  # most of it in the two heads
        ("S/32", dict(image_size=96, pool="gap", class_token=True, fc_norm=True)),
        ("Mixer-S/32", {}),
        ("Mixer-S/16", dict(image_size=(96, 120))),
        ("R50x1", dict(image_size=(96, 128))),
        ("R101x1", dict(units=(1, 1, 1, 1), width_factor=0.5)),
    ],
)
def test_model_flops_agree_with_xla(variant, options):
    model = vit_jax.create_model(variant, **options)
    image = jax.ShapeDtypeStruct((1, *model.image_size, 3), jnp.float32)
    lowered = jax.jit(lambda params, image: model.apply({"params": params}, image)).lower(
        adapt.abstract_params(model), image
    )
    counted = lowered.cost_analysis()["flops"]
    # XLA counts elementwise operations, too, and leaves out the zeros that padding multiplies.
    assert model.flops == pytest.approx(counted, rel=0.03)


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(timers.time, "perf_counter", lambda: self.now)


class Device:
    """Does the steps one after the other, each `seconds` long, while the host goes on; compiles in
    the first call.
    """

    def __init__(self, clock, compile_s: float):
        self.clock, self.compile_s, self.free, self.seconds = clock, compile_s, 0.0, 1.0

    def __call__(self, state, batch):
        self.clock.now += self.compile_s
        self.compile_s = 0.0
        self.free = max(self.free, self.clock.now) + self.seconds
        return state + 1, Result(self.clock, self.free)


class Result:
    def __init__(self, clock, ready: float):
        self.clock, self.ready = clock, ready

    def block_until_ready(self):
        self.clock.now = max(self.clock.now, self.ready)


def batches(clock, seconds: float):
    while True:
        clock.now += seconds
        yield "batch"


def steps(timer, device, source, durations) -> None:
    for device.seconds in durations:
        assert timer.step(device, 0, timer.next_batch(source))[0] == 1


def test_steps_that_are_dispatched_ahead_are_timed_on_the_device(monkeypatch):
    """The host needs no time at all; without waiting it would see 10 dispatches at once."""
    clock = Clock(monkeypatch)
    timer = StepTimer(batch_size=8, train_flops=100.0, peak_flops=200.0, num_devices=4)
    steps(
        timer,
        Device(clock, compile_s=30.0),
        batches(clock, 0.0),
        [1.0] * 4 + [2.0, 5.0] + [1.0] * 4,
    )
    assert clock.now == 30.0 + 13.0, "all but the last two were waited for, and no more"
    report = timer.report()
    assert report.pop("perf/step_ms_p95") == pytest.approx(1e3 * (2.0 + 0.7 * 3.0))
    assert report == {
        "perf/images_per_sec": 80 / 15, "perf/images_per_sec_per_chip": 20 / 15, "perf/step_ms": 1500.0,
        "perf/step_ms_p50": 1000.0, "perf/data_wait": 0.0, "perf/mfu": pytest.approx(100 * 80 / 15 / 800),
        "perf/compile_s": 30.0,
    }  # fmt: skip
    assert "perf/compile_s" not in timer.report(), "once"


def test_a_host_that_is_slower_than_the_device_sets_the_pace(monkeypatch):
    clock = Clock(monkeypatch)
    timer = StepTimer(8, 100.0, None, 1)
    timer.compile_s = 7.0  # compiled ahead of time
    device, source = Device(clock, compile_s=0.0), batches(clock, 3.0)
    steps(timer, device, source, [1.0] * 4)
    report = timer.report()
    assert report["perf/data_wait"] == 12.0 / 13.0 and report["perf/step_ms"] == 13e3 / 4
    assert report["perf/compile_s"] == 7.0 and "perf/mfu" not in report
    steps(timer, device, source, [1.0] * 4)
    assert timer.report()["perf/step_ms_p50"] == 3000.0


def test_evaluation_and_checkpoints_are_no_time_of_steps(monkeypatch):
    clock = Clock(monkeypatch)
    timer = StepTimer(8, 100.0, None, 1)
    device, source = Device(clock, compile_s=2.0), batches(clock, 0.0)
    steps(timer, device, source, [1.0] * 3)
    with timer.paused("evaluation"):
        assert clock.now == 5.0, "the steps are done before"
        clock.now += 100.0
    steps(timer, device, source, [1.0])
    with timer.paused("checkpoints"):
        clock.now += 10.0
    timer.report()
    steps(timer, device, source, [1.0] * 4)
    with timer.paused("evaluation"):
        clock.now += 100.0
    totals = timer.totals()
    assert totals["paused"] == {"evaluation": 200.0, "checkpoints": 10.0}
    assert (totals["steps"], totals["seconds"]) == (8, 220.0)
    assert totals["perf/images_per_sec"] == 8.0 and totals["perf/step_ms_p95"] == 1000.0
    assert totals["perf/compile_s"] == 2.0


def test_a_run_without_steps_has_totals(monkeypatch):
    Clock(monkeypatch)
    totals = StepTimer(8, 100.0, None, 1).totals()
    assert (
        totals["steps"] == 0 and "perf/step_ms_p50" not in totals and "perf/compile_s" not in totals
    )


@pytest.mark.parametrize("first", [0, 1])
def test_a_profile_from_the_first_step_on(first, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    window = ProfilerWindow(tmp_path / "profile", first, 1)
    for number in (1, 2, 3):
        window.before_step(number)
        calls.append(number)
    assert calls == ["start", 1, "stop", 2, 3]


def test_memory_is_that_of_the_fullest_device(monkeypatch):
    def device(**stats):
        return types.SimpleNamespace(memory_stats=lambda: stats or None)

    devices = [
        device(peak_bytes_in_use=2**30, bytes_in_use=1),
        device(bytes_in_use=3 * 2**30),
        device(),
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert hbm_gib() == {"perf/hbm_gib": 3.0}
    monkeypatch.setattr(jax, "local_devices", lambda: [device()])
    assert hbm_gib() == {}


def test_peaks_are_known_for_listed_chips_only():
    assert hardware.peak_flops("TPU v5 lite") == 197e12
    assert hardware.peak_flops("cpu") is None
