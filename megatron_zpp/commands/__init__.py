"""Programs run by hand. A package, since `report` is also a program of examples/quickstart."""
