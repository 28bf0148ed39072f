"""`vit_jax.data check`: of the data sets of a config, or of image files."""

from vit_jax.data.check import of_config, of_files
from vit_jax.errors import UserError


def run(config, args) -> dict:
    """Checks what the arguments name, prints and returns the report."""
    if bool(args.folder) == bool(args.location):
        found = "both" if args.folder else "neither"
        raise UserError(
            f"data check got {found} of FOLDER and --config: give a folder of images, or a config "
            "whose data sets are checked"
        )
    if args.unlabelled and not args.folder:
        raise UserError(
            "--unlabelled has no effect with --config, whose objective decides whether labels are "
            "read: leave it out"
        )
    if not args.folder:
        return of_config.run(config, args)
    if args.overrides:
        raise UserError(
            f"{args.overrides[0]} has no effect without --config: leave it out, or give a config "
            "instead of FOLDER"
        )
    return of_files.run(args.folder, args.out, labelled=not args.unlabelled)
