"""From the command line to checked settings: flags, DeepSpeed's file, presets, and the generated page of flags."""
