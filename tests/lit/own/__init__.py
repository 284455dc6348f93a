"""What a user of the template brings: modules, callbacks, nets, optimizers, data."""
