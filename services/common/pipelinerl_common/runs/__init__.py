"""A run as it was recorded: its records, and what they add up to over time and in the end."""
