# SPDX-License-Identifier: Apache-2.0
"""Every public name of mooncake.pg again."""

from mooncake.pg import *  # noqa: F403
from mooncake.pg import __all__  # noqa: F401
