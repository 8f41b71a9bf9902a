"""Run the ``protoseam`` command: ``python -m protoseam VERB …``."""

from __future__ import annotations

import sys


def main() -> int:
    """Start the command of :mod:`protoseam.lab`, or say why this system cannot.

    Returns:
        The exit status.
    """
    try:
        from protoseam.lab.cli.main import main as run
    except ImportError as error:
        print(f"protoseam: {error}", file=sys.stderr)
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
