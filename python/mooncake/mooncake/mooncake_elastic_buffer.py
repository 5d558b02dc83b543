# SPDX-License-Identifier: Apache-2.0
"""Not there yet."""

raise ImportError("ElasticBuffer is not part of this version of heddle: use mooncake.mooncake_ep_buffer.Buffer")
