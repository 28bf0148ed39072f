"""Analytic FLOPs against XLA's count, and the timer."""

import jax
import jax.numpy as jnp
import pytest

import vit_jax
from vit_jax import adapt, chips, perf


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("B/16", {}),
        ("B/16", dict(pool="gap", image_size=384, pre_logits=True)),
        ("S/32", dict(pool="map", image_size=(192, 256))),
        ("R50+B/16", {}),
        ("R26+S/32", dict(image_size=(200, 264))),
        ("R+Ti/16", {}),
        ("S/16", dict(posemb="relative")),  # without the products by distance it would be 4 % off
        ("S/32", dict(image_size=96, registers=16)),  # 9 patch tokens: the registers are most of the work
        ("S/32", dict(image_size=96, pool="map", registers=16, class_token=True)),
        ("Ti/16", dict(image_size=32, depth=1, num_classes=5000, distilled=True)),  # most of it in the two heads
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
    assert perf.model_flops(model) == pytest.approx(counted, rel=0.03)


def test_the_timer_reports_speed_wait_and_utilisation(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(perf.time, "perf_counter", lambda: now[0])

    def batches():
        while True:
            now[0] += 0.25
            yield "batch"

    timer, source = perf.StepTimer(batch_size=8, train_flops=100.0, peak_flops=1600.0), batches()
    for _ in range(2):
        assert timer.next_batch(source) == "batch"
        now[0] += 0.75
    report = timer.report()
    assert report == {
        "perf/images_per_sec": 8.0, "perf/step_ms": 1000.0, "perf/data_wait": 0.25, "perf/mfu": 0.5,
    }  # fmt: skip
    assert timer.steps == 0
    quiet = perf.StepTimer(8, 100.0, None)
    assert "perf/mfu" not in quiet.report()


def test_peaks_are_known_for_listed_chips_only():
    assert chips.peak_flops("TPU v5 lite") == 197e12
    assert chips.peak_flops("cpu") is None
