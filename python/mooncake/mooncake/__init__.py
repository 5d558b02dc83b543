# SPDX-License-Identifier: Apache-2.0
"""Drop-in names: applications written for Mooncake PG and EP run on heddle unchanged."""

# Other distributions may add modules to the same package.
__path__ = __import__("pkgutil").extend_path(__path__, __name__)
