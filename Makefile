# Both targets do all their set-up in .venv; they need Python 3.11 or newer and make.
PYTHON ?= python3
.DEFAULT_GOAL := demo

.PHONY: demo test plans faults slurm

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

# Without --no-compile, pip spends half of its time on modules that are never imported.
.venv/installed: setup.py pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --no-compile --editable '.[dev]'
	touch $@
