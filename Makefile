# Both targets do all their set-up in .venv; they need Python 3.11 or newer and make.
PYTHON ?= python3
.DEFAULT_GOAL := demo

.PHONY: demo test plans faults slurm reference

demo: .venv/installed
	.venv/bin/python -m vit_jax.demo

# Three workers keep two cores busy while some of the tests wait for other processes.
test: .venv/installed
	.venv/bin/python -m ruff check .
	.venv/bin/python -m pytest --numprocesses=3 --dist=worksteal

# Tries to lose a run in nine thousand ways, which takes forty minutes of two cores.
faults: .venv/installed
	PYTHONPATH=.:tests:tests/train .venv/bin/python tests/faults/harness.py --out=docs/reliability.md

# Jobs under a Slurm of two nodes on this machine, which takes a quarter of an hour.
slurm: .venv/installed
	PYTHONPATH=.:tests:tests/faults:tests/train .venv/bin/python tests/slurm/trials.py

# Compiles every recipe of configs/pods.py for its pod, which takes an hour of two cores.
plans: .venv/installed
	.venv/bin/python -m pip install --quiet --editable '.[dev,plan]'
	.venv/bin/python -m vit_jax.plan.pods_page --out=docs/pods.md

# The modules that users and other projects call.
REFERENCE = vit_jax vit_jax.errors \
	vit_jax.models.create vit_jax.models.classifier vit_jax.models.vit vit_jax.models.mixer \
	vit_jax.models.bit vit_jax.models.preparation \
	vit_jax.weights.pretrained vit_jax.weights.load vit_jax.weights.adapt \
	vit_jax.data.image_ops vit_jax.figures vit_jax.evaluate.predictions vit_jax.evaluate.fewshot \
	vit_jax.train.schedules vit_jax.train.optim

# Pages from docstrings; a warning is an error. TensorFlow starts a program when it is imported.
reference: .venv/installed
	PDOC_ALLOW_EXEC=1 .venv/bin/python -W error -m pdoc --docformat=google --output-directory=build/reference $(REFERENCE)

# Without --no-compile, pip spends half of its time on modules that are never imported.
.venv/installed: setup.py pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --no-compile --editable '.[dev]'
	touch $@
