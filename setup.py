"""For tools that still ask for setup.py; everything about the package stands in pyproject.toml."""

from setuptools import setup

setup()
