"""Your code: one short working example of each part, made to be overwritten."""
