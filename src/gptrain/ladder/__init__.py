"""The loss of a size that was never trained, from smaller ones: outputs/ladder/ladder.json, .png.

    python -m gptrain.ladder experiment=quickstart trainer.max_steps=-1 max_tokens=2e7 \\
        model.n_layers=8 hardware=h100_sxm "ladder.sizes=[0.25,0.375,0.5]"

All that train.py takes describes the target; its length is max_tokens, or the most of
ladder.tokens_per_parameter. What all of it takes is printed first; with --plan that is all. Typed
again, it goes on with the runs that are missing.

    ladder.sizes                 factors of the target's depth and width, or texts of overrides
    ladder.target                overrides of the target alone, as its devices
    ladder.tokens_per_parameter  at which a run of each size is cooled down
    ladder.seeds                 null: seed
    ladder.lr_rule               constant, sqrt_width or mup: how optimizer.lr goes with the width
    ladder.lr_width              to which optimizer.lr belongs; null: the target's
    ladder.count                 N: all parameters, matrices (no tables that are looked up), blocks
                                 (no embeddings, no head); auto: what predicts the largest size best
    ladder.budget                FLOPs, for which the best size is said; or ladder.dollars at
                                 ladder.price for an hour of a device of the target's
    hardware                     of the target, as in gptrain.plan
"""
