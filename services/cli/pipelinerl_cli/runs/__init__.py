"""A run as it was recorded: its records, time series, evaluations and summary, and its folder."""
