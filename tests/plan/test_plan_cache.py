"""What the compiler made of a step before is read from the user's cache, and nothing else is."""

import dataclasses
import zlib

import jax
import numpy as np
import pytest
from conftest import TINY

from vit_jax import config as configs
from vit_jax.distributed import hardware
from vit_jax.plan import compilation
from vit_jax.train.experiment import Experiment


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch):
    """One entry for each compilation, which is one of the CPU compiler."""
    counted = []
    compiled_arrays = compilation.compiled_arrays

    def count(lowered):
        counted.append(lowered)
        return compiled_arrays(lowered)

    monkeypatch.setattr(compilation, "compiled_arrays", count)
    return counted


def compile_step(tmp_path, *settings: str) -> compilation.Compiled:
    config = tmp_path / "tiny.py"
    config.write_text(TINY)
    overrides = [f"--config.{setting}" for setting in ("model.depth=1", *settings)]
    return compilation.compile_step(Experiment.on_devices(configs.load(str(config), overrides)))


def contents(compiled: compilation.Compiled) -> dict:
    fields = {field.name: getattr(compiled, field.name) for field in dataclasses.fields(compiled)}
    return fields | dict(program=fields["program"] and fields["program"].computations)


def test_the_same_step_is_compiled_once(tmp_path, cache, compilations):
    first, second = compile_step(tmp_path), compile_step(tmp_path)
    assert len(compilations) == 1
    assert contents(first) | dict(is_cached=True) == contents(second)
    assert not first.is_cached
    assert first.seconds > 0 and first.total_bytes > 0 and first.program.computations


def test_another_step_option_or_variable_is_compiled(tmp_path, cache, monkeypatch):
    compilations = []

    def compiled_arrays(lowered):
        compilations.append(lowered)
        return dict(total_bytes=np.array(1), program=np.frombuffer(zlib.compress(b""), np.uint8))

    monkeypatch.setattr(compilation, "compiled_arrays", compiled_arrays)
    compile_step(tmp_path)
    compile_step(tmp_path, "optim.lr=0.123")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_any=1")
    compile_step(tmp_path)
    monkeypatch.setitem(hardware.COMPILER_OPTIONS, "cpu", {})
    compile_step(tmp_path)
    assert len(compilations) == 4


def test_a_damaged_file_is_compiled_again(tmp_path, cache, compilations):
    first = compile_step(tmp_path)
    (path,) = cache.glob("plan-*.npz")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    second = compile_step(tmp_path)
    assert len(compilations) == 2
    assert contents(second) == contents(first) | dict(seconds=second.seconds)


def test_too_little_memory_is_known_the_second_time(tmp_path, cache, monkeypatch):
    def compile_(lowered):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm."
        )

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    first = compile_step(tmp_path)
    monkeypatch.undo()
    monkeypatch.setenv("VIT_JAX_CACHE", str(cache))
    second = compile_step(tmp_path)
    assert contents(first) | dict(is_cached=True) == contents(second)
    assert second.program is None and second.total_bytes == 20.5 * 2**30
