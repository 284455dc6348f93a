"""Recipes: short files that a user copies into a project and edits. See README.md."""
