"""From the command line to checked settings: flags, DeepSpeed's file, presets."""
