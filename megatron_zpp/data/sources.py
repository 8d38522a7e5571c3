"""The data sources of the trainer, one row each."""

from typing import Any

from megatron_zpp.data.build import FILES, FILES_PER_SPLIT, MOCK
from megatron_zpp.data.source import DataSource
from megatron_zpp.data.text_stream import STREAM

SOURCES = (FILES, FILES_PER_SPLIT, MOCK, STREAM)


def chosen_sources(flags: Any) -> dict[str, DataSource]:
    """Return the sources that DataSettings choose, by the first setting of each; a run has one."""
    given = {source: [name for name in source.settings if getattr(flags, name)] for source in SOURCES}
    return {names[0]: source for source, names in given.items() if names}
