"""Training a drafter: data, features, anchors, losses, the loop."""
