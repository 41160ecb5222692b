"""Resolves `spec.model.uri` to a folder on this machine, and installs it as `<output>/model`, where
every service of a job looks for it.
"""

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from pipelinerl_actor.models.folder import check_model_folder
from pipelinerl_common.checkpoints import MODEL
from pipelinerl_common.errors import SettingsError, Unavailable
from pipelinerl_common.settings import ModelSettings

_HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+$")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Resolves model URIs, and caches the models."""

    cache: Path
    """Folder for the tiny models, which are made when needed."""
    offline: bool = False
    """Uses only what an earlier download left on this machine."""
    hub: str | None = None
    """Address of the model hub; None for Hugging Face's."""

    def resolve(self, model: ModelSettings) -> Path:
        """The checked folder of `model`. Raises SettingsError with the remedy, or Unavailable for
        an unreachable hub.
        """
        if model.uri.startswith("tiny://"):
            folder = self._tiny(model.uri)
        elif model.uri.startswith("hf://"):
            folder = self._from_hub(model.uri.removeprefix("hf://"), model.revision)
        elif "://" in model.uri:
            raise _uri_fault(
                model.uri,
                "unknown kind; use a local folder, hf://organisation/name or tiny://arithmetic",
            )
        else:
            folder = Path(model.uri).expanduser().absolute()
        if model.revision is not None and not model.uri.startswith("hf://"):
            raise SettingsError(
                f"spec.model.revision={model.revision!r} is only for hf:// models, not for "
                f"{model.uri!r}"
            )
        check_model_folder(folder, model.max_model_len)
        return folder

    def _tiny(self, uri: str) -> Path:
        name, _, query = uri.removeprefix("tiny://").partition("?")
        if name != "arithmetic":
            raise _uri_fault(uri, "the only tiny model is tiny://arithmetic")
        values = {"digits": "1", "seed": "0"}
        for key, value in parse_qsl(query, keep_blank_values=True):
            if key not in values:
                raise _uri_fault(uri, f"unknown parameter {key!r}; it has {', '.join(values)}")
            values[key] = value
        if values["digits"] != "1":
            raise _uri_fault(
                uri, f"digits={values['digits']}, but the tiny model adds one-digit numbers only"
            )
        if not values["seed"].isdecimal():
            raise _uri_fault(uri, f"seed={values['seed']} must be a whole number, at least 0")
        from pipelinerl_actor.models.tiny import Recipe, cached_model

        return cached_model(Recipe(seed=int(values["seed"])), self.cache)

    def _from_hub(self, name: str, revision: str | None) -> Path:
        if not _HUB_NAME.match(name):
            raise SettingsError(f"spec.model.uri='hf://{name}': expected hf://organisation/name")
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        # A subclass stands before its base.
        faults: dict[type[Exception], str] = {
            GatedRepoError: "access is restricted; accept its terms, log in with `hf auth login`",
            RepositoryNotFoundError: "no such model on the hub, or it is private and needs a login",
            RevisionNotFoundError: f"no branch, tag or commit spec.model.revision={revision!r}",
        }
        where = f"spec.model.uri='hf://{name}'"
        try:
            folder = snapshot_download(
                name,
                revision=revision,
                allow_patterns=_HUB_PATTERNS,
                local_files_only=self.offline,
                endpoint=self.hub,
            )
        except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
            fault = next(fault for kind, fault in faults.items() if isinstance(error, kind))
            raise SettingsError(f"{where}: {fault}") from error
        except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
            how = f"cannot be downloaded: {error}"
            if self.offline:
                how = "is not on this machine and --offline forbids a download"
            raise Unavailable(
                f"{where}: {how}; or give a local folder as spec.model.uri"
            ) from error
        return Path(folder)


def _uri_fault(uri: str, what: str) -> SettingsError:
    return SettingsError(f"spec.model.uri={uri!r}: {what}")


def install_model(source: Path, output: Path, *, copy: bool) -> Path:
    """Links or copies the folder `source` to `<output>/model`, atomically, and returns that path.

    Idempotent. An existing folder is only replaced if an earlier call copied it.
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
            f"{target} is a folder that no model preparation made; move it, or use another --output"
        )
    shutil.rmtree(target)


def _stamp(source: Path) -> str:
    """Identifies the files that a copy was made of: path, names, sizes, times."""
    files = sorted(path for path in source.rglob("*") if path.is_file())
    lines = [
        f"{path.relative_to(source)} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for path in files
    ]
    return "\n".join([str(source), *lines])
