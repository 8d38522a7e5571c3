"""Every setting of a run, as plain records: what the rest of the package reads."""
