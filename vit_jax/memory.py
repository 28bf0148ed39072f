"""What a file says that it holds is compared with the memory of this machine before any is taken."""

import os

from vit_jax.errors import UserError


def check_fits(num_bytes: int, what) -> None:
    """Raises UserError where `what` would take more bytes than this machine has."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > machine:
        raise UserError(
            f"{what} declares {num_bytes / 2**30:,.1f} GiB of arrays, more than the {machine / 2**30:,.1f} GiB of "
            "memory here: it is damaged or not what it should be; choose another, or a larger machine"
        )
