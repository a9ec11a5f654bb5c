"""The environments that come with Headway, by name: import paths, so that none is loaded before it is wanted."""

from collections.abc import Mapping

BUILT_IN: Mapping[str, str] = {}
