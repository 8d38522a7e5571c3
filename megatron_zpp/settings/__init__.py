"""Settings of a run, as plain records."""
