# SPDX-License-Identifier: Apache-2.0
"""Importing it registers the torch backends `mooncake` and `mooncake-cpu`. Ranks are in-group ranks everywhere."""

from heddle.torch import *  # noqa: F403
from heddle.torch import __all__ as _all

# The others have modules of their own, or are not the peer's.
_NOT_HERE = {"Buffer", "EventOverlap", "ProcessGroup", "Work", "register_exchange"}
__all__ = [name for name in _all if name not in _NOT_HERE]
