"""A page, a picture or a few lines of text about runs, from metrics.jsonl. Imports neither torch nor torchtitan."""
