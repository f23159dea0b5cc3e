"""Train the two MiA retrievers: recipes, data, losses and the trainer. Imports ``mia_serve``, never the reverse."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mia_train.card import CardFacts, render_card
    from mia_train.config import Recipe, load_recipe
    from mia_train.trainer import run

# Resolved on first use, so that `import mia_train` and `mia-train --help` cost no torch.
_HOMES = {
    "CardFacts": "mia_train.card",
    "Recipe": "mia_train.config",
    "load_recipe": "mia_train.config",
    "render_card": "mia_train.card",
    "run": "mia_train.trainer",
}
__all__ = ["CardFacts", "Recipe", "load_recipe", "render_card", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
