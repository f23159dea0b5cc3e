"""Run the command line as ``python -m mia_serve``."""

from mia_serve.cli import main

if __name__ == "__main__":
    main()
