"""Commands that measure, break or compare, and are no tests: `tests/README.md` lists them."""
