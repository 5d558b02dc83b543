# SPDX-License-Identifier: Apache-2.0
"""Build backend: meson-python, whose wheel gets the tag that it deserves.

The package has a shared library and no extension module: one wheel serves every Python 3.
"""

import pathlib
import subprocess
import sys

from mesonpy import (  # noqa: F401
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)
from mesonpy import build_wheel as _build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    wheel = pathlib.Path(wheel_directory) / _build_wheel(wheel_directory, config_settings, metadata_directory)
    tags = ["--remove", "--python-tag", "py3", "--abi-tag", "none"]
    command = [sys.executable, "-m", "wheel", "tags", *tags, str(wheel)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
