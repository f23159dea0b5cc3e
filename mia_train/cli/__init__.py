"""The ``mia-train`` command. Modules here import nothing heavy at their top, so that ``--help`` answers at once."""

from mia_train.cli.app import main

__all__ = ["main"]
