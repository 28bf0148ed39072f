#!/bin/bash
# What launch.tpu_vm calls on every worker: setup, run COMMAND..., status, stop, logs.
#
# Files in ~/vit_jax_job: pid (of the command), exit_code (after its end), stopped (made by `stop`), log.txt.
set -euo pipefail
code=$(cd "$(dirname "$0")/.." && pwd)
job="$HOME/vit_jax_job"

running() { [ -s "$job/pid" ] && kill -0 "$(cat "$job/pid")" 2> /dev/null; }

setup() {
  cd "$code"
  # The system's Python may be older than 3.11, so uv installs one; Ubuntu 24.04 allows pip only with this variable.
  PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --python=3.11 --allow-existing .venv
  python3 -m uv pip install --quiet --python=.venv/bin/python --editable '.[tpu]'
  # JAX warns without this on v5e and newer. Where sudo is not allowed, the start is only slower.
  echo always | sudo tee /sys/kernel/mm/transparent_hugepage/enabled > /dev/null || true
  .venv/bin/python -c 'import jax, vit_jax'
}

run() {
  mkdir -p "$job"
  if running; then
    echo "error: a command already runs on $(hostname): wait for its end or stop it first" >&2
    return 2
  fi
  rm -f "$job/pid" "$job/exit_code" "$job/stopped"
  cd "$code"
  # In a session of its own, without our streams, so that the end of ssh does not end it.
  PATH="$code/.venv/bin:$PATH" setsid bash launch/worker.sh supervise "$@" >> "$job/log.txt" 2>&1 < /dev/null &
  until [ -s "$job/pid" ]; do sleep 0.1; done
}

supervise() {
  "$@" &
  echo "$!" > "$job/pid"
  local ended=0
  wait "$!" || ended=$?
  echo "$ended" > "$job/exit_code"
}

state() {
  if [ -s "$job/exit_code" ] && [ -e "$job/stopped" ]; then
    echo stopped
  elif [ -s "$job/exit_code" ]; then
    echo "exit $(cat "$job/exit_code")"
  elif running; then
    echo running
  elif [ -e "$job/pid" ]; then
    echo lost
  else
    echo none
  fi
}

# Prints four fields, separated by tabs: vit_jax, host, state, last line of the log.
status() {
  local now
  now=$(state)
  # A command that has just ended may have no exit code yet.
  if [ "$now" = lost ]; then
    sleep 1
    now=$(state)
  fi
  printf 'vit_jax\t%s\t%s\t%s\n' "$(hostname)" "$now" "$(tail -n 1 "$job/log.txt" 2> /dev/null | tr '\t\r' '  ')"
}

# SIGTERM makes the training save and end; after five minutes the command is killed.
stop() {
  running || return 0
  touch "$job/stopped"
  kill -TERM "$(cat "$job/pid")"
  for _ in $(seq 300); do
    running || return 0
    sleep 1
  done
  kill -KILL "$(cat "$job/pid")"
}

logs() { tail -n 100 -F "$job/log.txt" | sed -u "s/^/$(hostname): /"; }

case "${1:-}" in
  setup | run | supervise | status | stop | logs) "$@" ;;
  *) echo "error: worker.sh does not know '${1:-}': choose one of setup, run, status, stop, logs" >&2 && exit 2 ;;
esac
