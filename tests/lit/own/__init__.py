"""Modules, callbacks, nets, optimizers and data as a user of the template writes them."""
