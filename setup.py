"""Metadata and dependencies are in pyproject.toml; compiled extensions are declared here."""

from setuptools import setup

setup()
