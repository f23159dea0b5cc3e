"""``python -m mia_train`` and ``accelerate launch -m mia_train``."""

from __future__ import annotations

from mia_train.cli import main

if __name__ == "__main__":
    main()
