# Both targets do all their set-up in .venv; they need Python 3.11 or newer and make.
PYTHON ?= python3
.DEFAULT_GOAL := demo

.PHONY: demo test

demo: .venv/installed
	.venv/bin/python -m vit_jax.demo

test: .venv/installed
	.venv/bin/python -m ruff check .
	.venv/bin/python -m pytest --numprocesses=2 --dist=loadfile

.venv/installed: setup.py pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@
