"""Flipwatch: an online health monitor for LLM servers."""

from importlib.metadata import version

__version__ = version("flipwatch")
