"""A net from its config, and its weights from wherever they lie; without Lightning."""
