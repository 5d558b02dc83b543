# SPDX-License-Identifier: Apache-2.0
"""Where the files that belong to the package are: the library and the command."""

from __future__ import annotations

import os
import pathlib

_PACKAGE = pathlib.Path(__file__).resolve().parent
# Of a checkout; in an installed package there is no such folder.
_BUILD = _PACKAGE.parent.parent / "build"


def _first(*places: pathlib.Path) -> pathlib.Path | None:
    return next((place for place in places if place.exists()), None)


def find() -> pathlib.Path:
    """The shared library: HEDDLE_LIBRARY, else the one in the package, else the one in the checkout's build/.

    Raises ImportError naming the places.
    """
    named = os.environ.get("HEDDLE_LIBRARY")
    places = (_PACKAGE / "libheddle.so", _BUILD / "src" / "libheddle.so")
    found = pathlib.Path(named) if named else _first(*places)
    if found is None:
        raise ImportError(f"no libheddle.so: looked for {places[0]}, {places[1]}; HEDDLE_LIBRARY names another place")
    return found


def find_command() -> pathlib.Path:
    """The `heddle` command, in the package or in the checkout's build/. Raises FileNotFoundError naming the places."""
    places = (_PACKAGE / "bin" / "heddle", _BUILD / "heddle")
    found = _first(*places)
    if found is None:
        raise FileNotFoundError(f"no heddle command: looked for {places[0]}, {places[1]}")
    return found
