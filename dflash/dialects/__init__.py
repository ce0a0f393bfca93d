"""The formats in which drafters are published, and the one that this library uses."""
