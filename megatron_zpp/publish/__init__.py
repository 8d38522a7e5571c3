"""Exact weights of a run for other processes, such as inference engines: a folder of small safetensors files.

A trainer writes with ``Publisher``, readers follow with ``WeightReader``: docs/how-to/publish-weights.md.
Needs torch alone.
"""

from .files import PublishError as PublishError
from .publisher import Publisher as Publisher
from .reader import WeightReader as WeightReader
