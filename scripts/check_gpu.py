#!/usr/bin/env python3
"""Run the tests that need a CUDA device: scripts/check_gpu.py. Further arguments go to pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA device here; run this on a machine with a GPU", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", *sys.argv[1:]]
    return subprocess.call(command, cwd=Path(__file__).resolve().parents[1])


if __name__ == "__main__":
    sys.exit(main())
