"""Generation of text by a trained net, and scores of given texts."""
