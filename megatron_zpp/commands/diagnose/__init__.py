"""Programs that say what is wrong: with a node, with a job that hung."""
