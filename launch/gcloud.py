"""Runs the commands of `tpu_pod.py`."""

import shlex
import subprocess

from vit_jax.errors import NegativeResult


class GcloudFailed(NegativeResult):
    """A gcloud command failed, perhaps temporarily: no network, an expired login."""


def call(*commands: list[str]) -> None:
    """Runs commands in parallel; raises GcloudFailed if one fails, after what it printed."""
    jobs = [subprocess.Popen(command) for command in commands]
    for job, code in [(job, job.wait()) for job in jobs]:
        if code:
            raise GcloudFailed(
                f"{shlex.join(job.args)} failed with exit code {code}: fix what it reports above "
                "and try again"
            )


def ask(command: list[str]) -> str:
    """What gcloud says of the queued resource; "" if there is none; GcloudFailed if it can't
    tell.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    if "NOT_FOUND" in done.stderr:
        return ""
    raise GcloudFailed(
        f"{shlex.join(command)} failed with {done.stderr.strip()}: fix it and try again"
    )
