"""Output for people: tables, files of rows, figures, progress bar, log messages, loggers."""
