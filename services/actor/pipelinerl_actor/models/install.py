"""Puts a resolved model where every service of a job looks for it: `<output>/model`."""

import os
import shutil
import tempfile
from pathlib import Path

from pipelinerl_common.checkpoints import MODEL
from pipelinerl_common.errors import SettingsError


def install_model(source: Path, output: Path, *, copy: bool) -> Path:
    """Links (or copies) the folder `source` to `<output>/model`, replacing what was there at once,
    and returns that path.

    Idempotent. A real folder that is already there is only replaced when it was copied from
    elsewhere by an earlier call.
    """
    target = output / MODEL
    is_linked = target.is_symlink() and target.resolve() == source.resolve()
    is_source = not target.is_symlink() and target.exists() and target.samefile(source)
    if is_source or (is_linked and not copy):
        return target
    output.mkdir(parents=True, exist_ok=True)
    if copy:
        _copy(source.resolve(), target)
    else:
        _link(source.resolve(), target)
    return target


def _link(source: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        _remove_copy(target)
    with tempfile.TemporaryDirectory(prefix=".model-", dir=target.parent) as scratch:
        link = Path(scratch) / MODEL
        link.symlink_to(source, target_is_directory=True)
        os.replace(link, target)


def _copy(source: Path, target: Path) -> None:
    origin = target / ".copied-from"
    stamp = _stamp(source)
    if not target.is_symlink() and origin.is_file() and origin.read_text(encoding="utf-8") == stamp:
        return
    scratch = Path(tempfile.mkdtemp(prefix=".model-", dir=target.parent))
    try:
        shutil.copytree(source, scratch, dirs_exist_ok=True)
        (scratch / ".copied-from").write_text(stamp, encoding="utf-8")
        os.chmod(scratch, 0o755)
        if target.is_symlink():
            target.unlink()
        elif target.exists():
            _remove_copy(target)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_copy(target: Path) -> None:
    if not (target / ".copied-from").is_file():
        raise SettingsError(
            f"{target} is a folder that was not put there by a model preparation; move it away or "
            "use another --output"
        )
    shutil.rmtree(target)


def _stamp(source: Path) -> str:
    """Says which files a copy was made of: path, names, sizes, times."""
    files = sorted(path for path in source.rglob("*") if path.is_file())
    lines = [
        f"{path.relative_to(source)} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for path in files
    ]
    return "\n".join([str(source), *lines])
