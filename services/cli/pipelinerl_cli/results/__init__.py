"""What a run leaves behind: metrics.jsonl and the numbers in summary.json."""
