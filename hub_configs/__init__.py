"""One folder per drafter: the config.json that ships, and for the embedded default its weights and code."""
