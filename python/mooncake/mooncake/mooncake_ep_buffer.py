# SPDX-License-Identifier: Apache-2.0
"""The low-latency buffer of a mixture-of-experts layer."""

from heddle.torch import Buffer, EventOverlap

__all__ = ["Buffer", "EventOverlap"]
