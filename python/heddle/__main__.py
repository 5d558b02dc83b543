# SPDX-License-Identifier: Apache-2.0
"""`python -m heddle` is the `heddle` command."""

from __future__ import annotations

import os
import sys

from heddle import _library


def main() -> None:
    """Becomes the command, with this program's arguments."""
    command = str(_library.find_command())
    os.execv(command, [command, *sys.argv[1:]])


if __name__ == "__main__":
    main()
