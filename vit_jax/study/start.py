"""Runs a command of Python on some cores, and has it stopped if the process of the study ends.

python -m vit_jax.study.start PARENT CORES WORDS...

PARENT is the process id of the study, CORES are numbers with commas between them, or "all". It is a
process of its own because a process with threads, as those of JAX, can't safely be forked.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def main(argv: list[str]) -> None:
    parent, cores, *words = argv
    if cores != "all":
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    if os.path.exists("/proc/self"):  # Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit("the study has ended")
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
