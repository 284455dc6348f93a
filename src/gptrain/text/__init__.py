"""Text from a trained net, and scores of given texts."""
