"""The commands' words with a person: options, progress bars, and figures written into pages."""
