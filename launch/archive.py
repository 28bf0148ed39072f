"""The archive of this checkout that every worker gets."""

import pathlib
import subprocess

from vit_jax.errors import UserError

# The files that git tracks, as they are, committed or not; with "$3" = --all also those that it
# neither tracks nor ignores. An index of its own leaves the user's index alone.
PACK = (
    'cd "$1" && cp "$(git rev-parse --git-path index)" "$2.index" && '
    'export GIT_INDEX_FILE="$2.index" && git add "$3" && '
    'git archive --format=tar.gz --output="$2" "$(git write-tree)" && rm "$GIT_INDEX_FILE"'
)
NAMED = 5  # files in a message


def command(root: pathlib.Path, target: str, untracked: bool) -> list[str]:
    """The words of a command that writes the archive."""
    choice = "--all" if untracked else "--update"
    return ["bash", "-c", PACK, "pack", str(root), target, choice]


def check(root: pathlib.Path, untracked: bool, max_mb: float, needed: str | None) -> list[str]:
    """What a user should know about the files to be sent, as lines.

    Args:
      untracked: whether files that git neither tracks nor ignores are sent, too.
      needed: a file without which the command fails; None if there is no such file.

    Raises:
      UserError: there is no git checkout, `needed` is not sent, or all files together have more
        than `max_mb` megabytes.
    """
    tracked = files(root, "--cached")
    others = files(root, "--others", "--exclude-standard")
    changed = lines(root, "diff", "--name-only", "-z", "HEAD") if has_commit(root) else tracked
    sent = sorted({*tracked, *(others if untracked else [])})
    if not tracked and not untracked:
        raise UserError(f"git tracks no file of {root}: git add them, or give --untracked")
    if needed and (root / needed).exists() and needed not in sent:
        raise UserError(
            f"{needed} is not tracked by git, so no worker would get it: git add it, or give "
            "--untracked to send all files that git does not ignore"
        )
    sizes = {name: size(root / name) for name in sent}
    total = sum(sizes.values()) / 1e6
    if total > max_mb:
        largest = sorted(sizes, key=sizes.get, reverse=True)[:NAMED]
        texts = [f"{name} ({sizes[name] / 1e6:.1f} MB)" for name in largest]
        raise UserError(
            f"{total:.1f} MB would be sent to every worker, more than --max_mb={max_mb:g}, the "
            f"largest being {', '.join(texts)}: let git ignore or remove what the command does not "
            "need, or raise --max_mb"
        )
    said = [f"sending {len(sent)} files, {total:.1f} MB, to every worker"]
    if changed:
        said.append(f"with changes that are not committed: {names(changed)}")
    if others and not untracked:
        said.append(
            f"without files that git does not track: {names(others)}; --untracked sends them"
        )
    return said


def names(found: list[str]) -> str:
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more


def size(path: pathlib.Path) -> int:
    """Bytes of a file; 0 if it is a link or has been deleted."""
    return path.lstat().st_size if path.is_file() and not path.is_symlink() else 0


def files(root: pathlib.Path, *options: str) -> list[str]:
    return lines(root, "ls-files", "-z", *options)


def has_commit(root: pathlib.Path) -> bool:
    return bool(lines(root, "rev-list", "--all", "--max-count=1"))


def lines(root: pathlib.Path, *words: str) -> list[str]:
    """What git prints, cut at zero bytes."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip()
        raise UserError(
            f"git can't list the files of {root} ({reason}): start runs from a checkout with git"
        ) from None
    return [name for name in done.stdout.split("\0") if name]
